"""The door for who computes features: conversations in, samples out."""

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from eagle3.features.conversation import Conversation
from eagle3.features.sample import Sample
from eagle3.target.facts import LogitTransform


class Extractor(Protocol):
    """Runs the target over conversations and keeps what training needs.

    What makes going on senseless is an InputError; a conversation of which there are no features is counted.
    """

    captured_by: str  # in the store's settings: another one rounds otherwise
    tokens: int  # of the samples so far
    left_out: Counter[str]  # conversations without a sample, by reason

    def __call__(self, conversations: Iterator[Conversation]) -> Iterator[Sample]:
        """Yield samples in the order of their conversations, taking some ahead."""

    def logit_transform(self) -> LogitTransform:
        """Return what makes the target's logits of `lm_head` times the last hidden state."""
