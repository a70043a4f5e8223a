"""How a head drafts, in the words of SGLang's flags."""

from dataclasses import dataclass

from eagle3.engine.adaptive import first_steps, read_adaptive
from eagle3.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An exported head and how it drafts. `draft_tokens` counts the tree's root; None is for a chain: steps + 1.

    With the file `adaptive` (adaptive.py) chains have as many steps as it says, and the three numbers do not count."""

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


def num_draft_tokens(steps: int, topk: int, draft_tokens: int | None) -> int:
    """Tokens that a round verifies, the root included; InputError for a shape that SGLang would change or refuse."""
    given = f"steps={steps} topk={topk} draft_tokens={draft_tokens}"
    if topk == 1:
        if draft_tokens not in (None, steps + 1):
            raise InputError(f"{given}: a chain (topk=1) has steps + 1 tokens; set draft_tokens={steps + 1} or null")
        return steps + 1
    most = 1 + topk + (steps - 1) * topk**2
    if draft_tokens is None or not 2 <= draft_tokens <= most:
        raise InputError(f"{given}: such a tree (topk > 1) has from 2 to {most} tokens; set draft_tokens within that")
    return draft_tokens
