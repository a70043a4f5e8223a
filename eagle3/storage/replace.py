"""A folder that is replaced as a whole, by one process at a time."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eagle3.errors import InputError
from eagle3.storage.lock import hold

AT_WORKING_DIRECTORY, EXCHANGE = -100, 2  # of renameat2


def require_free_place(directory: Path, *, setting: str) -> None:
    """Raise InputError for a folder that cannot be renamed."""
    place = directory.resolve()
    if Path.cwd().is_relative_to(place):
        raise InputError(
            f"{setting}={directory} is the folder that this command runs in, or one around it, and cannot be replaced; "
            f"name a folder in it"
        )
    if place.is_mount():
        raise InputError(f"{setting}={directory} is a mount point and cannot be replaced; name a folder in it")


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Give a folder to write into, next to `directory`, whose place it takes when the block ends well.

    A kill leaves the old or the new content, and the next call or `put_right` removes the rest."""
    place = directory.resolve()  # of a link, what it points to
    lock, new, old = _beside(place)
    with hold(lock):
        _finish(place, new, old)
        new.mkdir()
        try:
            yield new
            if not _exchange(new, place):
                if place.exists():
                    place.rename(old)
                new.rename(place)
        finally:
            _finish(place, new, old)
            shutil.rmtree(lock, ignore_errors=True)


def put_right(directory: Path) -> None:
    """Remove what a killed `replacing` left, and give the old folder its name again if it was between the two."""
    place = directory.resolve()
    lock, new, old = _beside(place)
    if not lock.is_dir():
        return
    with suppress(InputError, OSError), hold(lock):  # somebody is writing it now, or we may not
        _finish(place, new, old)
        shutil.rmtree(lock, ignore_errors=True)


def _beside(place: Path) -> list[Path]:
    """Return the folders of the lock, and of the new and the old content."""
    return [place.with_name(f".{place.name}.{kind}") for kind in ("lock", "new", "old")]


def _finish(place: Path, new: Path, old: Path) -> None:
    if old.exists() and not place.exists():
        old.rename(place)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once; False where the system or the file system cannot, or one is absent."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = [os.fsencode(path) for path in (one, other)]
    at = AT_WORKING_DIRECTORY
    return rename is not None and rename(at, names[0], at, names[1], EXCHANGE) == 0
