"""How a head drafts, in terms of SGLang's flags."""

from dataclasses import dataclass

from eagle3.draft_shape import num_draft_tokens
from eagle3.engine.adaptive import first_steps, read_adaptive


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An exported head and how it drafts. `draft_tokens` counts the tree's root; None is for a chain: steps + 1.

    With the file `adaptive` (adaptive.py), it decides the length of chains, and the three numbers are ignored."""

    head: str
    steps: int
    topk: int
    draft_tokens: int | None
    adaptive: str | None = None

    def __post_init__(self) -> None:
        """Raise InputError for a shape that SGLang would change or refuse."""
        if self.adaptive is not None:
            read_adaptive(self.adaptive)
        num_draft_tokens(self.steps, self.topk, self.draft_tokens)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Steps, topk and draft tokens that a server starts with."""
        if self.adaptive is None:
            return self.steps, self.topk, num_draft_tokens(self.steps, self.topk, self.draft_tokens)
        steps = first_steps(read_adaptive(self.adaptive))
        return steps, 1, steps + 1
