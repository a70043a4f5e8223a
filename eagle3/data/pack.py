"""A pack: whole samples laid end to end, with the rows to train. What one training step receives.

Shapes: N samples, T tokens of the pack, H hidden size, J teacher rows, R trained rows, U turns with trained rows.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.features.sample import Sample
from eagle3.head.rows import pairs_before, runs, trained_rows


@dataclass(frozen=True, kw_only=True)
class Pack:
    input_ids: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]  # RoPE position inside the sample
    aux: Float[Tensor, "T 3H"]
    rows: Int[Tensor, " R"]  # ascending positions in the pack
    depth: Int[Tensor, " R"]  # number of unroll steps that the row is trained for
    last: Float[Tensor, "J H"]  # the target's final-normed state
    argmax: Int[Tensor, " J"]  # of the teacher, over the whole target vocabulary
    teacher_of: Int[Tensor, " T"]  # index of a position's teacher row; 0 where it has none
    rows_of_sample: Int[Tensor, " R"]  # how many trained rows the row's sample has
    token_bounds: tuple[int, ...]  # N + 1: where samples begin and end in T
    row_bounds: tuple[int, ...]  # N + 1: the same in R
    pair_bounds: tuple[int, ...]  # R + 1: trained (step, row) pairs before each teacher, see `pairs_before`
    turn_bounds: tuple[int, ...]  # U + 1: where the rows of a turn, which follow one another, begin and end in R
    turn_ends: tuple[int, ...]  # U: the position behind a turn's last row
    sample_ids: tuple[str, ...]
    rows_in_step: float  # trained rows of the optimizer step, over ranks and accumulation, per pack
    samples_in_step: float

    def to(self, device: torch.device, non_blocking: bool = False) -> "Pack":
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def pack_samples(
    samples: list[Sample],
    *,
    ttt_steps: int,
    rows_in_step: float | None = None,
    samples_in_step: float | None = None,
    pin: bool = False,
) -> Pack:
    """Join samples; `rows_in_step` and `samples_in_step` default to this pack's own. `pin` writes the features into
    page-locked memory, which a GPU can copy from while the host goes on."""
    rows, depth, rows_of_sample, teacher_of = [], [], [], []
    token_bounds, row_bounds, num_teachers = [0], [0], 0
    for sample in samples:
        sample_rows, sample_depth = trained_rows(sample.turns, ttt_steps)
        rows.append(sample_rows + token_bounds[-1])
        depth.append(sample_depth)
        rows_of_sample.append(torch.full_like(sample_rows, len(sample_rows)))
        has_teacher = sample.teacher_rows
        teacher_of.append(torch.where(has_teacher, has_teacher.cumsum(0) - 1 + num_teachers, 0))
        num_teachers += len(sample.last)
        token_bounds.append(token_bounds[-1] + len(sample.input_ids))
        row_bounds.append(row_bounds[-1] + len(sample_rows))
    turn_bounds, turn_ends = runs(torch.cat(rows))
    return Pack(
        input_ids=torch.cat([sample.input_ids for sample in samples]).long(),
        positions=torch.cat([torch.arange(len(sample.input_ids)) for sample in samples]),
        aux=joined([sample.aux for sample in samples], pin=pin),
        rows=torch.cat(rows),
        depth=torch.cat(depth),
        last=joined([sample.last for sample in samples], pin=pin),
        argmax=torch.cat([sample.argmax for sample in samples]).long(),
        teacher_of=torch.cat(teacher_of),
        rows_of_sample=torch.cat(rows_of_sample),
        token_bounds=tuple(token_bounds),
        row_bounds=tuple(row_bounds),
        pair_bounds=pairs_before(torch.cat(depth), ttt_steps),
        turn_bounds=turn_bounds,
        turn_ends=turn_ends,
        sample_ids=tuple(sample.id for sample in samples),
        rows_in_step=row_bounds[-1] if rows_in_step is None else rows_in_step,
        samples_in_step=len(samples) if samples_in_step is None else samples_in_step,
    )


def joined(parts: list[Float[Tensor, "_ W"]], *, pin: bool) -> Float[Tensor, "T W"]:
    # Pinned memory is reused by torch from pack to pack; fresh memory costs more than the copy into it.
    shape = sum(len(part) for part in parts), parts[0].shape[1]
    return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=pin))
