"""Drafting in terms of SGLang's flags, and SGLang's adaptive drafting: steps by the number of requests.

The file of adaptive drafting is a JSON object, {"1": {"candidate_steps": [7]}, "32": {"candidate_steps": [0]}}: a
batch takes the entry of the largest number that is not above its size. With 0 steps SGLang drafts nothing, but still
verifies each token, and runs the head unless SKIP_EXTEND is set. Of several candidates it takes one by what was
accepted before, whatever it costs; `tune` writes one, the fastest it measured.
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

# Read by SGLang 0.5.17 to 0.5.23 (environ.py): at 0 steps, the head is not run on verified tokens. Its cache then lacks
# them, and drafts are worse for a while when chains begin again.
SKIP_EXTEND = {"SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": 1}


@dataclass(frozen=True, kw_only=True)
class Draft(DraftShape):
    """An exported head and how it drafts. `draft_tokens` counts the tree's root; None is for a chain: steps + 1.

    The head attends to the last `window` tokens (None: all). The file `adaptive`, where there is one, decides how long
    chains are, and the three numbers are ignored."""

    head: str
    algorithm: str | None = "EAGLE3"  # SGLang's name of how its kind of head drafts; None: no server serves it
    window: int | None = None
    adaptive: str | None = None

    def __post_init__(self) -> None:
        """Raise InputError for a shape that SGLang would change or refuse."""
        if self.adaptive is not None:
            read_adaptive(self.adaptive)
        super().__post_init__()

    @property
    def shape(self) -> Shape:
        if self.adaptive is None:
            return super().shape
        # The longest chain of the smallest number of requests that has one.
        steps = next(max(each) for each in read_adaptive(self.adaptive).values() if any(each))
        return Shape(steps, 1, steps + 1)


def adaptive_json(steps: Mapping[int, int]) -> dict[str, dict[str, list[int]]]:
    return {str(load): {"candidate_steps": [each]} for load, each in sorted(steps.items())}


def write_adaptive(path: Path, steps: Mapping[int, int]) -> None:
    write_json(path, adaptive_json(steps))


def read_adaptive(path: str) -> dict[int, list[int]]:
    """Return the candidates of each number of requests; InputError where there are none."""
    try:
        given = json.loads(Path(path).read_bytes())
        found = {int(load): entry["candidate_steps"] for load, entry in given.items() if load.isdecimal()}
        drafts = any(step > 0 for steps in found.values() for step in steps)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f'adaptive={path} cannot be read as a file like {{"1": {{"candidate_steps": [3]}}}} '
            f"({type(error).__name__}); make one with: python serve.py action=tune tune.loads=[1,2,4,8,16,32,64] ..."
        ) from None
    if not drafts:
        raise InputError(f"adaptive={path} has no steps for any number of requests: serve the target without a head")
    return dict(sorted(found.items()))


def require_adaptive(information: Mapping[str, Any], *, name: str) -> None:
    """Raise InputError if SGLang has turned adaptive drafting off, which it reports only in its log."""
    if not information.get("speculative_adaptive"):
        raise InputError(
            f"{name} does not draft adaptively: its SGLang has turned that off, the log says why; leave out adaptive"
        )
