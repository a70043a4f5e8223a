"""What a row check is: it sees one prompt and says whether it passes, changed or not, and what it counted."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from eagle3.prompts.reading.prompt import Prompt

NOTHING: Mapping[str, int] = MappingProxyType({})


class Verdict(NamedTuple):
    """What a check says about one prompt."""

    reason: str | None = None  # why the prompt is refused, never with its text; None: it passes
    prompt: Prompt | None = None  # the changed prompt, e.g. masked; None: as it came
    counts: Mapping[str, int] = NOTHING  # added up per source under the check's name in the ledger


class Check(Protocol):
    """A filter of prompts. Checks are pickled to worker processes: load what is heavy at the first call, not before."""

    name: str  # its section of the ledger: licenses, length, language, privacy, ...

    def __call__(self, prompt: Prompt) -> Verdict: ...


@runtime_checkable
class LooksAhead(Protocol):
    """A check that is shown the prompts of a group before it is asked about each: it reads them at once."""

    def look_ahead(self, prompts: Iterable[Prompt]) -> None: ...
