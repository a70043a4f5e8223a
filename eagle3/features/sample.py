"""One training sample: a tokenised conversation with the target's features, as a safetensors file.

    input_ids           U8 [T, W]     each id in W bytes, the lowest first; W is the least that all ids fit in
    turns               I32 [X, 3]    of each answer: where it begins, where it ends, its number from 1 up
    aux_hidden_states   [T, AH]       BF16, F16, F32; or F8_E4M3 with
    aux_exponents       U8 [T, A]     each layer's values are to be multiplied by 2^(exponent - 127)
    last_hidden_state   [J, H]        the same, with last_exponents U8 [J, 1]
    teacher_argmax      U8 [J, W]     as input_ids

Shapes: T tokens, A captured layers, H hidden size, AH = A · H, J positions with a teacher, X answers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from eagle3.engine.hooks.eagle3_fp8 import packed, unpacked
from eagle3.errors import InputError
from eagle3.features.turns import find_answer_spans, teacher_positions
from eagle3.storage.safetensors_header import StoredTensor, header_bytes, read_tensors

# Safetensors' names of the types that tensors are stored in.
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U8": torch.uint8,
    "F8_E4M3": torch.uint8,  # the bits; engine/hooks/eagle3_fp8.py
}

NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}
ARRAYS = {"U8": np.uint8, "I32": np.int32}  # types of token ids and turns
ROWS = {"aux": "aux_hidden_states", "last": "last_hidden_state"}


@dataclass(frozen=True)
class ScaledRows:
    """Rows in fp8 (engine/hooks/eagle3_fp8.py) that travel packed, and arrive unpacked where `to` sends them."""

    values: UInt8[Tensor, "T AH"]  # the bits of e4m3
    exponents: UInt8[Tensor, "T A"]

    def __post_init__(self) -> None:
        rows, layers = self.exponents.shape
        if len(self.values) != rows or self.values.shape[1] % max(layers, 1):
            raise ValueError("its exponents do not fit its values")

    def __len__(self) -> int:
        return len(self.values)

    def to(self, device: torch.device, non_blocking: bool = False) -> Float[Tensor, "T AH"]:
        moved = (each.to(device, non_blocking=non_blocking) for each in (self.values, self.exponents))
        return unpacked(*moved)

    def cpu(self) -> "ScaledRows":
        return ScaledRows(self.values.cpu(), self.exponents.cpu())


def scaled(rows: Float[Tensor, "T AH"], layers: int) -> ScaledRows:
    """Pack finite rows of `layers` layers side by side."""
    return ScaledRows(*packed(rows, layers))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A conversation with its features. `turns`: see turns.py. `has_teacher` marks the positions that the rows of
    `last_hidden_state` and `teacher_argmax` belong to."""

    id: str
    input_ids: Int[Tensor, " T"]
    turns: Int[Tensor, " T"]
    aux_hidden_states: Float[Tensor, "T AH"] | ScaledRows
    last_hidden_state: Float[Tensor, "J H"] | ScaledRows
    teacher_argmax: Int[Tensor, " J"]
    has_teacher: Bool[Tensor, " T"]


def positions_with_teacher(turns: Int[Tensor, " T"], kind: str) -> Bool[Tensor, " T"]:
    """Mark positions whose teacher is stored: `answers` (what answers are trained on) or `all` (every position)."""
    return torch.ones_like(turns, dtype=torch.bool) if kind == "all" else teacher_positions(turns)


def stored_rows(
    rows: Float[Tensor, "N W"], dtype: torch.dtype, *, layers: int, sample_id: str
) -> Float[Tensor, "N W"] | ScaledRows:
    """Return rows of `layers` hidden states side by side as the store keeps them, on the CPU; InputError for values
    that its type cannot hold."""
    fp8 = dtype is torch.float8_e4m3fn
    rows = rows.to(torch.float32 if fp8 else dtype)
    if not rows.isfinite().all():
        raise InputError(
            f"features.dtype={str(dtype).removeprefix('torch.')}: hidden states of sample {sample_id} are not finite "
            f"in it; take features.dtype=bfloat16 (float16 ends at 65504) and no target.dtype=float16"
        )
    return (scaled(rows, layers) if fp8 else rows).cpu()


def to_buffers(sample: Sample) -> list[bytes | memoryview]:
    """Return the sample's file in parts: a header, then the tensors' own memory, which may be large."""
    tensors = stored_tensors(sample)
    header = header_bytes({name: (NAMES[each.dtype], each.shape) for name, each in tensors.items()}, {"id": sample.id})
    content = (tensor.contiguous().view(torch.uint8).numpy() for tensor in tensors.values())
    return [header, *(each.reshape(-1).data for each in content)]


def stored_tensors(sample: Sample) -> dict[str, Tensor]:
    """Lay a sample out by the names, types and order of its file: widest first, so that each is aligned."""
    answers = [(begin, end, int(sample.turns[begin])) for begin, end in find_answer_spans(sample.turns)]
    tensors = {
        "input_ids": in_bytes(sample.input_ids),
        "turns": torch.tensor(answers, dtype=torch.int32).reshape(-1, 3),
        "teacher_argmax": in_bytes(sample.teacher_argmax),
    }
    for name in ("aux", "last"):
        rows = getattr(sample, ROWS[name])
        if isinstance(rows, ScaledRows):
            tensors |= {ROWS[name]: rows.values.view(torch.float8_e4m3fn), f"{name}_exponents": rows.exponents}
        else:
            tensors[ROWS[name]] = rows
    return dict(sorted(tensors.items(), key=lambda pair: (-pair[1].itemsize, pair[0])))


def from_bytes(blob: memoryview, *, sample_id: str, teachers: str) -> Sample:
    """Read a sample whose large tensors are views of `blob`; any exception means that the blob is damaged."""
    # Small arrays are NumPy's: reader threads share the interpreter with the training step, and reading a sample by
    # PyTorch's calls takes twice the time.
    stored = read_tensors(blob)[1]
    input_ids, argmax = (ids_from_bytes(array(stored.pop(name))) for name in ("input_ids", "teacher_argmax"))
    turns, has_teacher = np.zeros(len(input_ids), np.int64), np.full(len(input_ids), teachers == "all")
    before = 0
    for begin, end, number in array(stored.pop("turns")).tolist():
        if not (before <= begin < end <= len(turns) and number > 0):
            raise ValueError("its answers exceed its tokens")
        turns[begin:end], has_teacher[begin : end - 1], before = number, True, end  # as turns.teacher_positions
    tensors = {name: view(*each) for name, each in stored.items()}
    rows = {
        ROWS[name]: ScaledRows(tensors.pop(ROWS[name]), tensors.pop(f"{name}_exponents"))
        if f"{name}_exponents" in tensors
        else tensors.pop(ROWS[name])
        for name in ROWS
    }
    lengths = len(turns), int(has_teacher.sum())
    if tensors or (*map(len, rows.values()), len(argmax)) != (*lengths, lengths[1]):
        raise ValueError("its tensors do not fit together")
    return Sample(
        id=sample_id,
        input_ids=torch.from_numpy(input_ids),
        turns=torch.from_numpy(turns),
        teacher_argmax=torch.from_numpy(argmax),
        has_teacher=torch.from_numpy(has_teacher),
        **rows,
    )


def in_bytes(ids: Int[Tensor, " T"]) -> UInt8[Tensor, "T W"]:
    width = max(1, (int(ids.max()).bit_length() + 7) // 8) if len(ids) else 1
    return ids.int().unsqueeze(1).contiguous().view(torch.uint8)[:, :width].contiguous()


def ids_from_bytes(ids: UInt8[np.ndarray, "T W"]) -> Int[np.ndarray, " T"]:
    if ids.shape[1] > 4:
        raise ValueError("its ids are wider than four bytes")
    wide = np.zeros((len(ids), 4), np.uint8)
    wide[:, : ids.shape[1]] = ids
    return wide.view(np.int32).reshape(-1)


def array(stored: StoredTensor) -> np.ndarray:
    return np.frombuffer(stored.content, ARRAYS[stored.dtype]).reshape(stored.shape)


def views(content: memoryview) -> dict[str, Tensor]:
    return {name: view(*stored) for name, stored in read_tensors(content)[1].items()}


def view(dtype: str, shape: list[int], content: memoryview) -> Tensor:
    kind = DTYPES[dtype]
    return (torch.frombuffer(content, dtype=kind) if len(content) else torch.empty(0, dtype=kind)).view(shape)
