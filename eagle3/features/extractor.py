"""Interface for feature extractors: conversations in, samples out."""

from collections import Counter
from collections.abc import Iterator
from typing import Self

from eagle3.features.conversation import Conversation
from eagle3.features.sample import Sample
from eagle3.target.facts import LogitTransform


class Extractor:
    """Runs the target over conversations and keeps what training needs; ready inside `with`.

    Fatal problems raise InputError; a conversation that yields no features is counted.
    """

    left_out: Counter[str]  # conversations without a sample, by reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, conversations: Iterator[Conversation]) -> Iterator[Sample]:
        """Yield samples in the order of their conversations, taking some ahead. Called once for each run of them."""
        raise NotImplementedError

    def logit_transform(self) -> LogitTransform:
        """Return what turns `lm_head` times the last hidden state into the target's logits."""
        raise NotImplementedError
