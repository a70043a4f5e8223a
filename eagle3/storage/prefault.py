"""Reads the pages of mapped files ahead of their use.

Otherwise page faults are served one page at a time, while the thread may hold the GIL: that costs many times the copy
(benchmarks/results/local_read.json).
"""

import ctypes
import hashlib
import mmap
from typing import Any

import numpy as np

AT_ONCE = 64 * 2**20
POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14: all pages of a range, when the call returns


def bring_in(address: int, size: int) -> None:
    """Read the pages of this memory in; where the system cannot, or for a page or less, they are read when used."""
    begin = address - address % mmap.PAGESIZE
    if size > mmap.PAGESIZE and _madvise is not None:
        _madvise(begin, address + size - begin, POPULATE_READ)  # without the lock; an error changes nothing


def sha256_bytes(content: bytes | memoryview) -> str:
    """Hash bytes that may be a mapped file."""
    digest = hashlib.sha256()
    for begin in range(0, len(content), AT_ONCE):
        part = content[begin : begin + AT_ONCE]
        bring_in(np.frombuffer(part, np.uint8).ctypes.data, len(part))
        digest.update(part)
    return digest.hexdigest()


_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
