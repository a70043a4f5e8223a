"""One writer at a time."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from eagle3.errors import InputError
from eagle3.storage.files import read_json, with_filename, write_json

LOCK, HOLDER = ".lock", ".lock.json"


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep `folder` for this process while the block runs; InputError names the process that holds it already.

    The system gives a lock back when its process ends, however it ends. On a network file system it holds among
    machines as far as that knows `flock`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        with with_filename(folder / LOCK):  # a file system without locks
            lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"{folder} is being written by {_holder(folder)}; wait for it or stop it, or choose another folder"
        ) from None
    try:
        write_json(
            folder / HOLDER,
            {"pid": os.getpid(), "host": platform.node(), "since": datetime.now(UTC).isoformat("T", "seconds")},
        )
        yield
    finally:
        with suppress(OSError):  # a full disk, or a folder that was deleted meanwhile
            (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    try:
        who = read_json(folder / HOLDER, made_by="")
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (InputError, OSError, KeyError):  # it has just begun, or just ended
        return "another process"
