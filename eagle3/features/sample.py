"""One training sample: a tokenised conversation with the target's features, as a safetensors blob.

Shapes: T tokens, A captured layers, H hidden size, AH = A · H, J positions with a teacher.
"""

import json
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save
from torch import Tensor

from eagle3.errors import InputError
from eagle3.features.turns import teacher_positions

# What safetensors calls the types that tensors are stored in.
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I16": torch.int16,
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A conversation with its features. `turns`: see turns.py. `has_teacher` marks the positions that the rows of
    `last_hidden_state` and `teacher_argmax` belong to."""

    id: str
    input_ids: Int[Tensor, " T"]
    turns: Int[Tensor, " T"]
    aux_hidden_states: Float[Tensor, "T AH"]
    last_hidden_state: Float[Tensor, "J H"]
    teacher_argmax: Int[Tensor, " J"]
    has_teacher: Bool[Tensor, " T"]


def positions_with_teacher(turns: Int[Tensor, " T"], kind: str) -> Bool[Tensor, " T"]:
    """Mark positions whose teacher is stored: `answers` (what answers are trained on) or `all` (every position)."""
    return torch.ones_like(turns, dtype=torch.bool) if kind == "all" else teacher_positions(turns)


def require_finite(aux: Tensor, last: Tensor, *, sample_id: str) -> None:
    """Raise InputError for hidden states that the stored type cannot hold."""
    if not (aux.isfinite().all() and last.isfinite().all()):
        raise InputError(
            f"features.dtype={str(aux.dtype).removeprefix('torch.')}: hidden states of sample {sample_id} are not "
            f"finite in it; take features.dtype=bfloat16 (float16 ends at 65504) and no target.dtype=float16"
        )


def to_bytes(sample: Sample) -> bytes:
    return save(
        {
            "input_ids": sample.input_ids.int(),
            "turns": sample.turns.short(),
            "aux_hidden_states": sample.aux_hidden_states.contiguous(),
            "last_hidden_state": sample.last_hidden_state.contiguous(),
            "teacher_argmax": sample.teacher_argmax.int(),
        },
        metadata={"id": sample.id},
    )


def from_bytes(blob: memoryview, *, sample_id: str, teachers: str) -> Sample:
    """Read a sample whose large tensors are views of `blob`; any exception means that the blob is damaged."""
    tensors = views(blob)
    turns = tensors["turns"].long()
    return Sample(id=sample_id, **tensors | {"turns": turns}, has_teacher=positions_with_teacher(turns, teachers))


def views(blob: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a safetensors blob, without the two copies that the library's `load` makes."""
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
