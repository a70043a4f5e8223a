"""What a benchmark of reading holds its own against: the same files read from end to end, cold or warm."""

import os
import time
from pathlib import Path

BLOCK = 2**23


def forget(folder: Path) -> None:
    """Ask the system to drop what it keeps of the folder's files."""
    os.sync()
    for path in filter(Path.is_file, folder.iterdir()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> int:
    """Read every file of the folder, one after the other; return the bytes."""
    total, buffer = 0, bytearray(BLOCK)
    for path in sorted(filter(Path.is_file, folder.iterdir())):
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                total += got
    return total


def read_rate(folder: Path) -> float:
    """Return the bytes per second of `read`."""
    began = time.perf_counter()
    return read(folder) / (time.perf_counter() - began)
