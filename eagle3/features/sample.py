"""One training sample: a tokenised conversation with the target's features, as a safetensors blob.

Shapes: T tokens, H hidden size, J teacher rows.
"""

import json
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save
from torch import Tensor

from eagle3.head.rows import teacher_rows

# What safetensors calls the types that a sample is stored in.
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I16": torch.int16,
}


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


def from_bytes(blob: memoryview, *, sample_id: str, stored_teacher_rows: str) -> Sample:
    """The large tensors are views of `blob`; any exception means that it is damaged."""
    tensors = views(blob)
    turns = tensors["turns"].long()
    return Sample(
        id=sample_id, **tensors | {"turns": turns}, teacher_rows=rows_with_teacher(turns, stored_teacher_rows)
    )


def views(blob: memoryview) -> dict[str, Tensor]:
    """The tensors of a safetensors blob, without the two copies that the library's `load` makes."""
    header_end = 8 + int.from_bytes(blob[:8], "little")
    header, data = json.loads(bytes(blob[8:header_end])), blob[header_end:]
    header.pop("__metadata__", None)
    # Without gap or overlap, as the format demands: then no view reaches beyond its sample.
    bounds = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    if [begin for begin, _ in bounds] + [len(data)] != [0] + [end for _, end in bounds]:
        raise ValueError("its tensors do not fill it")
    return {name: view(data, **entry) for name, entry in header.items()}


def view(data: memoryview, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    part = data[slice(*data_offsets)]
    flat = torch.frombuffer(part, dtype=DTYPES[dtype]) if len(part) else torch.empty(0, dtype=DTYPES[dtype])
    return flat.view(shape)
