"""How answers are made and drafted: keys of conf/serve.yaml, checked before anything is loaded or started."""

from dataclasses import dataclass

from eagle3.decoding.speculate import tokens_of_round
from eagle3.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How the target answers: the keys of the same names in conf/serve.yaml."""

    max_new_tokens: int
    temperature: float
    seed: int

    def __post_init__(self) -> None:
        # The first token comes from prefill: without a second one no draft is ever verified.
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 2:
            raise InputError(f"max_new_tokens={self.max_new_tokens} must be a whole number from 2 up, e.g. 96")
        if not isinstance(self.temperature, int | float) or self.temperature < 0:
            raise InputError(f"temperature={self.temperature} must be 0 (greedy) or more, e.g. temperature=0.7")
        if not isinstance(self.seed, int):
            raise InputError(f"seed={self.seed} must be a whole number, e.g. seed=0")

    def longest_prompt(self, context: int, *, steps: int) -> int:
        """Return how many tokens of the target's `context` a prompt may take, beside its answer and the drafts."""
        return context - self.max_new_tokens - steps - 1


@dataclass(frozen=True, kw_only=True)
class Decoding(Answering):
    """How the target answers, and how the head drafts."""

    steps: int
    topk: int
    draft_tokens: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens_of_round(self.steps, self.topk, self.draft_tokens)
