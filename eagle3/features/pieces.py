"""The work of the features stage in pieces: the conversations of one shard each.

Pieces depend on the answers and on the shards that are there, on nothing else: any number of workers makes the same.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from eagle3.features.conversation import Conversation
from eagle3.features.sample import positions_with_teacher

ABOUT_SAMPLE = 1024  # bytes of headers and padding


@dataclass(frozen=True)
class Piece:
    """What becomes a shard; `made_from` is the hash of what decides its content."""

    made_from: str
    conversations: list[Conversation]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """How many bytes a conversation's sample will have, but for headers."""

    layers: int
    hidden_size: int
    dtype: torch.dtype
    teachers: str

    def __call__(self, conversation: Conversation) -> int:
        row = self.hidden_size * self.dtype.itemsize
        taught = int(positions_with_teacher(conversation.turns, self.teachers).sum())
        return ABOUT_SAMPLE + (len(conversation.turns) * self.layers + taught) * row

    def tokens_in(self, num_bytes: float) -> float:
        """Return about how many tokens are so many bytes, all of them with a teacher."""
        return num_bytes / ((self.layers + 1) * self.hidden_size * self.dtype.itemsize)


def pieces_of(
    conversations: Iterator[Conversation], *, taken: Collection[int], made_from: str, weight: Weight, shard_bytes: float
) -> Iterator[tuple[int, Piece]]:
    """Cut conversations where a shard is full, and number what comes out: with the free numbers, from 0 on."""
    numbers = (number for number in itertools.count() if number not in taken)
    held: list[Conversation] = []
    size = 0
    for conversation in conversations:
        held.append(conversation)
        size += weight(conversation)
        if size >= shard_bytes:
            yield next(numbers), Piece(made_from, held)
            held, size = [], 0
    if held:
        yield next(numbers), Piece(made_from, held)
