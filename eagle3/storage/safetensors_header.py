"""Headers of safetensors files, for tensors that are written from memory and read as views of a mapped file.

The library's `load` copies the bytes twice, and `save` needs all of them at once.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

WIDTHS = {"I64": 8, "F64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "F8_E4M3": 1}  # bytes


class StoredTensor(NamedTuple):
    dtype: str
    shape: list[int]
    content: memoryview


def header_bytes(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return what stands before the tensors' bytes, which follow in the order of `tensors`: name → (dtype, shape)."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + WIDTHS[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(content: memoryview) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata and the tensors as views of `content`; any exception means that it is damaged."""
    header_end = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(bytes(content[8:header_end])), content[header_end:]
    metadata = header.pop("__metadata__", {})
    # Without gap or overlap, as the format demands: then no view reaches beyond the file.
    bounds = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    if [begin for begin, _ in bounds] + [len(data)] != [0] + [end for _, end in bounds]:
        raise ValueError("its tensors do not fill it")
    return metadata, {
        name: StoredTensor(entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
