"""One training sample: a tokenised conversation with the target's features, as a safetensors blob.

Shapes: T tokens, H hidden size, J teacher rows.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load, save
from torch import Tensor

from eagle3.head.rows import teacher_rows


@dataclass(frozen=True, kw_only=True)
class Sample:
    """`turns` is 0 at prompt tokens and i at the tokens of the i-th answer; `teacher_rows` says which positions the
    rows of `last`, `argmax` and `logsumexp` belong to."""

    id: str
    input_ids: Int[Tensor, " T"]
    turns: Int[Tensor, " T"]
    aux: Float[Tensor, "T 3H"]
    last: Float[Tensor, "J H"]
    argmax: Int[Tensor, " J"]
    logsumexp: Float[Tensor, " J"]
    teacher_rows: Bool[Tensor, " T"]


def rows_with_teacher(turns: Int[Tensor, " T"], kind: str) -> Bool[Tensor, " T"]:
    """Rows whose teacher is stored: `answers` (what answers can be trained on) or `all` (for loss_mask=everything)."""
    return torch.ones_like(turns, dtype=torch.bool) if kind == "all" else teacher_rows(turns)


def to_bytes(sample: Sample) -> bytes:
    return save(
        {
            "input_ids": sample.input_ids.int(),
            "turns": sample.turns.short(),
            "aux": sample.aux.contiguous(),
            "last": sample.last.contiguous(),
            "argmax": sample.argmax.int(),
            "logsumexp": sample.logsumexp.float(),
        },
        metadata={"id": sample.id},
    )


def from_bytes(blob: bytes, *, sample_id: str, stored_teacher_rows: str) -> Sample:
    tensors = load(blob)
    turns = tensors["turns"].long()
    return Sample(
        id=sample_id, **tensors | {"turns": turns}, teacher_rows=rows_with_teacher(turns, stored_teacher_rows)
    )
