"""The shape of a draft: its steps, topk, and the number of tokens that a round verifies."""

from typing import NamedTuple

from eagle3.errors import InputError


class Shape(NamedTuple):
    """Shape of a draft; `draft_tokens` counts the root, also of a chain."""

    steps: int
    topk: int
    draft_tokens: int

    def __str__(self) -> str:
        return f"chain of {self.steps}" if self.topk == 1 else f"tree {self.steps}/{self.topk}/{self.draft_tokens}"


def checked_draft_shape(steps: int, topk: int, draft_tokens: int | None) -> Shape:
    """Return the shape; None is for a chain: steps + 1. InputError for what SGLang would change or refuse."""
    given = f"steps={steps} topk={topk} draft_tokens={draft_tokens}"
    if topk == 1:
        if draft_tokens not in (None, steps + 1):
            raise InputError(f"{given}: a chain (topk=1) has steps + 1 tokens; set draft_tokens={steps + 1} or null")
        return Shape(steps, topk, steps + 1)
    most = most_draft_tokens(steps, topk)
    if draft_tokens is None or not 2 <= draft_tokens <= most:
        raise InputError(f"{given}: such a tree (topk > 1) has from 2 to {most} tokens; set draft_tokens within that")
    return Shape(steps, topk, draft_tokens)


def most_draft_tokens(steps: int, topk: int) -> int:
    """Return how many tokens SGLang can choose a tree from, including its root."""
    return 1 + topk + (steps - 1) * topk**2
