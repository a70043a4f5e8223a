"""Interface of row checks: a check gets one prompt and returns whether it passes, changed or not, with counts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from eagle3.prompts.reading.prompt import Prompt


class Verdict(NamedTuple):
    """The result of a check for one prompt."""

    reason: str | None = None  # why the prompt is refused, without its text; None: it passes
    prompt: Prompt | None = None  # the changed prompt, e.g. masked; None: unchanged
    counts: Mapping[str, int] = MappingProxyType({})  # summed per source under the check's name in the ledger


class Check(Protocol):
    """A filter of prompts. Checks are pickled to worker processes: load large data at the first call, not before."""

    name: str  # of its section in the ledger: licenses, length, language, privacy, ...

    def __call__(self, prompt: Prompt) -> Verdict: ...
