"""The work of the features stage in pieces: the conversations of one shard each.

Pieces depend on the answers and on the shards that are there, on nothing else: any number of workers makes the same.

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
class Piece:
    """What becomes a shard; `made_from` is the hash of what decides its content."""

    made_from: str
    conversations: list[Conversation]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """How many bytes a conversation's sample has in a shard, by the layout that its writer uses."""

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
        """Return about how many tokens are so many bytes, all of them with a teacher."""
        return num_bytes / ((self.layers + 1) * self.hidden_size * self.dtype.itemsize)

    def _rows(self, count: int, layers: int) -> Shaped[Tensor, "count AH"] | ScaledRows:
        """Return rows without values."""
        if self.dtype is not torch.float8_e4m3fn:
            return torch.empty(count, layers * self.hidden_size, dtype=self.dtype, device="meta")
        shapes = (count, layers * self.hidden_size), (count, layers)
        return ScaledRows(*(torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes))


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
