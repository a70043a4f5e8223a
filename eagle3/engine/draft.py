"""Drafting in terms of SGLang's flags, and SGLang's adaptive drafting: steps by the number of requests.

The file of adaptive drafting is a JSON object, {"1": {"candidate_steps": [7]}, "32": {"candidate_steps": [0]}}: a
batch takes the entry of the largest number that is not above its size. With 0 steps SGLang drafts nothing, but still
verifies each token and runs the head. Of several candidates it takes one by what was accepted before, whatever it
costs; `tune` writes one, the fastest it measured.
Source: adaptive_spec_params.py of SGLang 0.5.17.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.draft_shape import Shape
from eagle3.errors import InputError
from eagle3.settings.serving import DraftShape
from eagle3.storage.files import write_json

MAKE = "make one with: python serve.py action=tune tune.loads=[1,2,4,8,16,32,64] ..."


@dataclass(frozen=True, kw_only=True)
class Draft(DraftShape):
    """An exported head and how it drafts. `draft_tokens` counts the tree's root; None is for a chain: steps + 1.

    The head attends to the last `window` tokens (None: all). The file `adaptive`, where there is one, decides how long
    chains are, and the three numbers are ignored."""

    head: str
    window: int | None = None
    adaptive: str | None = None

    def __post_init__(self) -> None:
        """Raise InputError for a shape that SGLang would change or refuse."""
        if self.adaptive is not None:
            read_adaptive(self.adaptive)
        super().__post_init__()

    @property
    def shape(self) -> Shape:
        """Steps, topk and draft tokens that a server starts with."""
        if self.adaptive is None:
            return super().shape
        # The longest chain of the smallest number of requests that has one.
        steps = next(max(each) for each in read_adaptive(self.adaptive).values() if any(each))
        return Shape(steps, 1, steps + 1)


def write_adaptive(path: Path, steps: Mapping[int, int]) -> None:
    """Write the steps of each number of requests."""
    write_json(path, {str(load): {"candidate_steps": [each]} for load, each in sorted(steps.items())})


def read_adaptive(path: str) -> dict[int, list[int]]:
    """Return the candidates of each number of requests; InputError for what SGLang would refuse or not draft with."""
    named = f"adaptive={path}"
    try:
        given = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{named} cannot be read ({type(error).__name__}); {MAKE}") from None
    entries = given.items() if isinstance(given, dict) else ()
    found = {int(load): _steps(entry) for load, entry in entries if load.isdecimal()}
    if not found or not all(found.values()):
        where = next((f"its entry {load}" for load, steps in found.items() if not steps), "it")
        raise InputError(f'{named}: {where} is not of the form {{"1": {{"candidate_steps": [3]}}}}; {MAKE}')
    if not any(map(any, found.values())):
        raise InputError(f"{named} has 0 steps for every number of requests: serve the target without a head")
    return dict(sorted(found.items()))


def require_adaptive(information: Mapping[str, Any], *, name: str) -> None:
    """Raise InputError if SGLang has turned adaptive drafting off, which it reports only in its log."""
    if not information.get("speculative_adaptive"):
        raise InputError(
            f"{name} does not draft adaptively: its SGLang has turned that off, the log says why; leave out adaptive"
        )


def _steps(entry: Any) -> list[int]:
    """Return an entry's candidates, none for what is no entry."""
    steps = entry.get("candidate_steps") if isinstance(entry, dict) else None
    are_steps = isinstance(steps, list) and all(type(each) is int and each >= 0 for each in steps)
    return steps if are_steps else []  # type: ignore[return-value]
