"""A pack: whole samples concatenated. head/batch.py derives the training batch from it.

Shapes: N samples, T tokens of the pack, A captured layers, H hidden size, AH = A · H, J positions with a teacher, R
anchors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor

from eagle3.engine.hooks.eagle3_fp8 import unpacked
from eagle3.features.sample import ROWS, Sample, ScaledRows
from eagle3.storage.prefault import bring_in


class OnDevice:
    """Base of frozen dataclasses whose tensors move to a device together, nested ones and tuples of them included."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor | OnDevice):
                moved[name] = value.to(device, non_blocking=non_blocking)
            elif _is_nested(value):
                moved[name] = tuple(part.to(device, non_blocking) for part in value)
        return replace(self, **moved)  # type: ignore[type-var]

    def tensors(self) -> Iterator[Tensor]:
        for value in vars(self).values():
            if isinstance(value, Tensor):
                yield value
            for part in value if _is_nested(value) else [value]:
                if isinstance(part, OnDevice):
                    yield from part.tensors()


def _is_nested(value: object) -> bool:
    """Tell a tuple of parts with tensors from one of numbers, which may have thousands."""
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], OnDevice)


@dataclass(frozen=True, kw_only=True)
class Pack(OnDevice):
    input_ids: Int[Tensor, " T"]
    turns: Int[Tensor, " T"]  # 0 at prompt tokens, i at the tokens of a sample's i-th answer; the loss mask is applied
    positions: Int[Tensor, " T"]  # RoPE position inside the sample
    aux_hidden_states: Shaped[Tensor, "T AH"]  # floats, or the bits of float8 e4m3 until `to`
    last_hidden_state: Shaped[Tensor, "J H"]  # final-normed; floats or bits as above
    teacher_argmax: Int[Tensor, " J"]  # over the whole target vocabulary
    teacher_index: Int[Tensor, " T"]  # index of a position in J; 0 where it has no teacher
    token_bounds: tuple[int, ...]  # N + 1: where samples begin and end in T
    sample_ids: tuple[str, ...]
    anchors_in_step: float  # anchors of the optimizer step, over ranks and accumulation, per pack
    samples_in_step: float
    aux_exponents: UInt8[Tensor, "T A"] | None = None  # scales of float8 states, until `to`
    last_exponents: UInt8[Tensor, "J 1"] | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Move the pack. States in fp8 are moved as they are and unpacked on the device, if it has float8."""
        if device.type == "mps":
            return super(Pack, self._unpacked()).to(device, non_blocking)
        return super().to(device, non_blocking)._unpacked()

    def _unpacked(self) -> Self:
        if self.aux_exponents is None or self.last_exponents is None:
            return self
        return replace(
            self,
            aux_hidden_states=unpacked(self.aux_hidden_states, self.aux_exponents),
            last_hidden_state=unpacked(self.last_hidden_state, self.last_exponents),
            aux_exponents=None,
            last_exponents=None,
        )


@dataclass(frozen=True, kw_only=True)
class Batch(OnDevice):
    """A training batch, which the reader threads prepare from a pack."""

    pack: Pack
    anchors: Int[Tensor, " R"]  # trained positions in the pack, ascending

    @property
    def num_anchors(self) -> int:
        return len(self.anchors)


def pack_samples(samples: list[Sample], *, anchors_in_step: float, samples_in_step: float, pin: bool = False) -> Pack:
    """Concatenate samples.

    `pin` writes the features into page-locked memory, which a GPU can copy from while the host continues.
    """
    # Few operations for all samples together: reader threads share the interpreter with the training step.
    token_bounds = (0, *accumulate(len(sample.input_ids) for sample in samples))
    starts, tokens = torch.tensor(token_bounds), torch.arange(token_bounds[-1])
    has_teacher = torch.cat([sample.has_teacher for sample in samples])
    return Pack(
        input_ids=torch.cat([sample.input_ids for sample in samples]).long(),
        turns=torch.cat([sample.turns for sample in samples]),
        positions=tokens - starts[:-1].repeat_interleave(starts.diff()),
        teacher_argmax=torch.cat([sample.teacher_argmax for sample in samples]).long(),
        teacher_index=torch.where(has_teacher, has_teacher.cumsum(0) - 1, 0),
        token_bounds=token_bounds,
        sample_ids=tuple(sample.id for sample in samples),
        anchors_in_step=anchors_in_step,
        samples_in_step=samples_in_step,
        **concatenated_states("aux", [sample.aux_hidden_states for sample in samples], pin=pin),
        **concatenated_states("last", [sample.last_hidden_state for sample in samples], pin=pin),
    )


def concatenated_states(name: str, parts: list[Any], *, pin: bool) -> dict[str, Any]:
    """Return fields of a Pack: concatenated states, with their scales if they are float8."""
    if isinstance(parts[0], ScaledRows):
        columns = {ROWS[name]: "values", f"{name}_exponents": "exponents"}
        return {
            key: concatenated([getattr(part, column) for part in parts], pin=pin) for key, column in columns.items()
        }
    return {ROWS[name]: concatenated(parts, pin=pin)}


def concatenated(parts: list[Shaped[Tensor, "_ W"]], *, pin: bool) -> Shaped[Tensor, "_ W"]:
    for part in parts:  # views of a mapped file
        bring_in(part.data_ptr(), part.nbytes)
    # Pinned memory is reused by torch from pack to pack; fresh memory costs more than the copy into it.
    shape = sum(len(part) for part in parts), parts[0].shape[1]
    return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=pin))
