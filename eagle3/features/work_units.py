"""Divides the features stage into work units: the conversations of one shard each.

Units depend only on the answers and on the shards that exist already, so any number of workers makes the same store.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from eagle3.features.conversation import Conversation
from eagle3.features.sample import positions_with_teacher

REST = 1024  # bytes of a sample's headers and ids


@dataclass(frozen=True)
class WorkUnit:
    """The conversations of one shard; `made_from` is the hash of the settings that decide its content."""

    made_from: str
    conversations: list[Conversation]


@dataclass(frozen=True, kw_only=True)
class SampleSizer:
    """Estimates the bytes of a conversation's sample in a shard: its hidden states, and REST for all else."""

    layers: int
    hidden_size: int
    dtype: torch.dtype
    teachers: str

    def __call__(self, item: Conversation) -> int:
        rows = len(item.input_ids) * self.layers + int(positions_with_teacher(item.turns, self.teachers).sum())
        return rows * self.hidden_size * self.dtype.itemsize + REST

    def tokens_in(self, num_bytes: float) -> float:
        """Return about how many tokens fit into so many bytes if all have a teacher."""
        return num_bytes / ((self.layers + 1) * self.hidden_size * self.dtype.itemsize)


def work_units(
    conversations: Iterator[Conversation],
    *,
    taken: Collection[int],
    made_from: str,
    sizer: SampleSizer,
    shard_bytes: float,
) -> Iterator[tuple[int, WorkUnit]]:
    """Yield a work unit for each full shard, with the free shard numbers from 0 up."""
    numbers = (number for number in itertools.count() if number not in taken)
    held: list[Conversation] = []
    size = 0
    for conversation in conversations:
        held.append(conversation)
        size += sizer(conversation)
        if size >= shard_bytes:
            yield next(numbers), WorkUnit(made_from, held)
            held, size = [], 0
    if held:
        yield next(numbers), WorkUnit(made_from, held)
