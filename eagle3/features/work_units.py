"""Divides the features stage into work units: the conversations of one shard each.

Units depend only on the answers and on the shards that exist already, so any number of workers makes the same store.

Shapes: A captured layers, H hidden size, AH = A · H.
"""

import itertools
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from eagle3.features.conversation import Conversation
from eagle3.features.fp8 import ScaledRows
from eagle3.features.sample import Sample, positions_with_teacher, stored_size


@dataclass(frozen=True)
class WorkUnit:
    """The conversations of one shard; `made_from` is the hash of the settings that decide its content."""

    made_from: str
    conversations: list[Conversation]


@dataclass(frozen=True, kw_only=True)
class SampleSizer:
    """Computes the bytes of a conversation's sample in a shard, from the layout that its writer uses."""

    layers: int
    hidden_size: int
    dtype: torch.dtype
    teachers: str

    def __call__(self, item: Conversation) -> int:
        has_teacher = positions_with_teacher(item.turns, self.teachers)
        sample = Sample(
            id=item.id,
            input_ids=item.input_ids,
            turns=item.turns,
            aux_hidden_states=self._rows(len(item.input_ids), self.layers),
            last_hidden_state=self._rows(int(has_teacher.sum()), 1),
            teacher_argmax=item.input_ids.roll(-1)[has_teacher],  # the target's tokens, or of their kind
            has_teacher=has_teacher,
        )
        return tarfile.BLOCKSIZE * (1 + -(-stored_size(sample) // tarfile.BLOCKSIZE))

    def tokens_in(self, num_bytes: float) -> float:
        """Return about how many tokens fit into so many bytes if all have a teacher."""
        return num_bytes / ((self.layers + 1) * self.hidden_size * self.dtype.itemsize)

    def _rows(self, count: int, layers: int) -> Shaped[Tensor, "count AH"] | ScaledRows:
        """Return rows without values."""
        if self.dtype is not torch.float8_e4m3fn:
            return torch.empty(count, layers * self.hidden_size, dtype=self.dtype, device="meta")
        shapes = (count, layers * self.hidden_size), (count, layers)
        return ScaledRows(*(torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes))


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
