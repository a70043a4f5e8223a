"""How answers are made and drafted: keys of conf/serve."""

from dataclasses import dataclass

from eagle3.draft_shape import num_draft_tokens
from eagle3.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How the target answers: keys of the same names in conf/serve."""

    max_new_tokens: int
    temperature: float
    seed: int

    def longest_prompt(self, context: int, *, steps: int) -> int:
        """Return how many tokens of the target's `context` a prompt may have; as below."""
        return longest_prompt(context, max_new_tokens=self.max_new_tokens, steps=steps)


def longest_prompt(context: int, *, max_new_tokens: int, steps: int) -> int:
    """Return how many tokens of the target's `context` a prompt may have, next to its answer and the drafts.

    Raises InputError if they leave no room for one."""
    room = context - max_new_tokens - steps - 1
    if room < 1:
        raise InputError(
            f"max_new_tokens={max_new_tokens} and {steps} drafts leave no room for a prompt in the target's "
            f"context of {context} tokens; set max_new_tokens={context // 2} or less"
        )
    return room


@dataclass(frozen=True, kw_only=True)
class Decoding(Answering):
    """How the target answers, and how the head drafts."""

    steps: int
    topk: int
    draft_tokens: int | None

    def __post_init__(self) -> None:
        num_draft_tokens(self.steps, self.topk, self.draft_tokens)
