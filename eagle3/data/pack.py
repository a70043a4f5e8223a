"""A pack: whole samples laid end to end. What is trained on it, the head's side derives (head/batch.py).

Shapes: N samples, T tokens of the pack, A captured layers, H hidden size, AH = A · H, J positions with a teacher.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.features.sample import Sample


class OnDevice:
    """A frozen dataclass whose tensors, and those of such dataclasses in it, move to a device together."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | OnDevice)
        }
        return replace(self, **moved)  # type: ignore[type-var]

    def tensors(self) -> Iterator[Tensor]:
        for value in vars(self).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, OnDevice):
                yield from value.tensors()


@dataclass(frozen=True, kw_only=True)
class Pack(OnDevice):
    input_ids: Int[Tensor, " T"]
    turns: Int[Tensor, " T"]  # 0 at prompt tokens, i at the tokens of a sample's i-th answer; the loss mask is applied
    positions: Int[Tensor, " T"]  # RoPE position inside the sample
    aux_hidden_states: Float[Tensor, "T AH"]
    last_hidden_state: Float[Tensor, "J H"]  # final-normed
    teacher_argmax: Int[Tensor, " J"]  # over the whole target vocabulary
    teacher_index: Int[Tensor, " T"]  # a position's place in J; 0 where it has no teacher
    token_bounds: tuple[int, ...]  # N + 1: where samples begin and end in T
    sample_ids: tuple[str, ...]
    anchors_in_step: float  # anchors of the optimizer step, over ranks and accumulation, per pack
    samples_in_step: float


class Batch(Protocol):
    """What a kind of head makes of a pack in the reader threads, and what its training step receives."""

    @property
    def pack(self) -> Pack: ...

    @property
    def num_anchors(self) -> int:
        """Positions that are trained, for rates in the log."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self: ...

    def tensors(self) -> Iterator[Tensor]: ...


AnyBatch = TypeVar("AnyBatch", bound=Batch)


def pack_samples(samples: list[Sample], *, anchors_in_step: float, samples_in_step: float, pin: bool = False) -> Pack:
    """Lay samples end to end.

    `pin` writes the features into page-locked memory, which a GPU can copy from while the host goes on.
    """
    teacher_index, token_bounds, num_teachers = [], [0], 0
    for sample in samples:
        teacher_index.append(torch.where(sample.has_teacher, sample.has_teacher.cumsum(0) - 1 + num_teachers, 0))
        num_teachers += len(sample.last_hidden_state)
        token_bounds.append(token_bounds[-1] + len(sample.input_ids))
    return Pack(
        input_ids=torch.cat([sample.input_ids for sample in samples]).long(),
        turns=torch.cat([sample.turns for sample in samples]),
        positions=torch.cat([torch.arange(len(sample.input_ids)) for sample in samples]),
        aux_hidden_states=laid_end_to_end([sample.aux_hidden_states for sample in samples], pin=pin),
        last_hidden_state=laid_end_to_end([sample.last_hidden_state for sample in samples], pin=pin),
        teacher_argmax=torch.cat([sample.teacher_argmax for sample in samples]).long(),
        teacher_index=torch.cat(teacher_index),
        token_bounds=tuple(token_bounds),
        sample_ids=tuple(sample.id for sample in samples),
        anchors_in_step=anchors_in_step,
        samples_in_step=samples_in_step,
    )


def laid_end_to_end(parts: list[Float[Tensor, "_ W"]], *, pin: bool) -> Float[Tensor, "_ W"]:
    # Pinned memory is reused by torch from pack to pack; fresh memory costs more than the copy into it.
    shape = sum(len(part) for part in parts), parts[0].shape[1]
    return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=pin))
