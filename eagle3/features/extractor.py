"""The door for who computes features: conversations in, samples out."""

from collections import Counter
from collections.abc import Iterator
from typing import Protocol, Self

from eagle3.features.conversation import Conversation
from eagle3.features.sample import Sample
from eagle3.target.facts import LogitTransform


class Extractor(Protocol):
    """Runs the target over conversations and keeps what training needs; ready inside `with`.

    What makes going on senseless is an InputError; a conversation of which there are no features is counted.
    """

    left_out: Counter[str]  # conversations without a sample, by reason

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def __call__(self, conversations: Iterator[Conversation]) -> Iterator[Sample]:
        """Yield samples in the order of their conversations, taking some ahead; called again, for more."""

    def logit_transform(self) -> LogitTransform:
        """Return what makes the target's logits of `lm_head` times the last hidden state."""
