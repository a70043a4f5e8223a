"""How answers are made and drafted: keys of conf/serve.yaml."""

from dataclasses import dataclass

from eagle3.engine.draft import num_draft_tokens


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How the target answers: the keys of the same names in conf/serve.yaml."""

    max_new_tokens: int
    temperature: float
    seed: int

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
        num_draft_tokens(self.steps, self.topk, self.draft_tokens)
