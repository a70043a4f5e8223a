"""Storage interface: a flat folder of files that are whole or absent, on this machine or in an object store."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from eagle3.errors import InputError, require_packages
from eagle3.storage.files import WHATEVER, LocalPendingFile, temporary_name, written_by_another

SCHEMES = ("s3", "gs", "az")


class PendingFile(Protocol):
    """A file that is being written and has no name yet."""

    def write(self, data: Any) -> int: ...

    def commit(self) -> None:
        """Give the file its name: from now on it exists, whole."""

    def discard(self) -> None:
        """Drop the file, which never existed under its name. Does nothing after `commit`."""


class Readable(Protocol):
    """A folder of files that are whole or absent. Names have no folders. Errors are OSErrors with a `filename`, or
    InputErrors; a name that is not there is a FileNotFoundError."""

    remote: bool  # reading waits for a network: several reads at once are of use

    @property
    def location(self) -> str:
        """Path or URL, for messages and records."""

    def size(self, name: str) -> int: ...

    def read(self, name: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> memoryview:
        """Return the bytes of a range that begins in the file, all by default. Safe to call from several threads.

        Bytes that come over a network are compared with `sha256`; local files only by `FeatureStore.verify`."""


class Storage(Readable, Protocol):
    """One that is written, too."""

    def names(self, pattern: str) -> list[str]:
        """List the files that match a glob pattern, sorted."""

    def version(self, name: str) -> str | None:
        """Return a text that changes when the file does; None if it does not exist."""

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""

    def delete_unfinished(self, pattern: str) -> None:
        """Delete what killed processes have left of files whose names match; no other process may be writing such."""

    def create(self, name: str, *, instead_of: str | None = WHATEVER) -> PendingFile:
        """Begin a file, which appears under `name` when it is committed and replaces one of that name.

        `commit` raises FileExistsError unless the present version is `instead_of`: so two writers are noticed.
        """


class LocalFolder:
    """A folder on this machine. Ranges are views of the mapped file: unused bytes are never read."""

    remote = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.location = str(self.path)
        self._mapped: dict[str, tuple[memoryview, int]] = {}  # by name: the bytes, and the file's inode

    def names(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.path.glob(pattern) if not path.name.startswith("."))  # being written

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def version(self, name: str) -> str | None:
        try:
            facts = (self.path / name).stat()
        except FileNotFoundError:
            return None
        return f"{facts.st_ino}-{facts.st_size}-{facts.st_mtime_ns}"

    def read(self, name: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> memoryview:
        if name not in self._mapped:  # two threads may both map a file; the second view stays
            self._mapped[name] = self._map(self.path / name), (self.path / name).stat().st_ino
        content, inode = self._mapped[name]
        with suppress(FileNotFoundError):  # deleted or replaced: the mapped bytes stay
            facts = os.stat(f"{self.location}/{name}")  # a microsecond; a page past the file's end is a SIGBUS
            if facts.st_size < len(content) and facts.st_ino == inode:
                raise InputError(
                    f"{self.path / name} was cut from {len(content)} to {facts.st_size} bytes while it was read; "
                    f"make it or copy it again, and change no file that a command reads"
                )
        return content[start:stop]

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)
        self._mapped.pop(name, None)

    def delete_unfinished(self, pattern: str) -> None:
        for path in self.path.glob(temporary_name(pattern, "*")):
            path.unlink(missing_ok=True)

    def create(self, name: str, *, instead_of: str | None = WHATEVER) -> "LocalPendingFile":
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / name

        def check() -> None:  # only new files have several writers (lock.py), so nobody comes in between
            if instead_of not in (WHATEVER, self.version(name)):
                raise written_by_another(path)

        exclusive = instead_of is None
        return LocalPendingFile(path, check=check, exclusive=exclusive, committed=lambda: self._mapped.pop(name, None))

    @staticmethod
    def _map(path: Path) -> memoryview:
        import torch  # stages without a target do without it

        with path.open("rb") as file:  # an OSError where it cannot be read; torch raises a RuntimeError
            size = os.fstat(file.fileno()).st_size
        if not size:
            return memoryview(b"")
        # Not Python's mmap, which keeps a file open: a thousand shards are more than a process may. Copy on write:
        # torch warns of tensors in read-only memory, and the file must never change.
        return memoryview(torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy().data)


def open_folder(place: str | Path, *, setting: str) -> Storage:
    """Open the folder that the config key `setting` names; nothing is read or made yet."""
    scheme, separator, _ = str(place).partition("://")
    if not separator:
        return LocalFolder(place)
    parts = urlsplit(str(place))
    if "@" in parts.netloc or parts.query or parts.fragment:  # not shown: it may be a secret
        raise InputError(
            f"{setting} is a URL with more than a bucket and a folder; give {scheme}://BUCKET/FOLDER and put "
            f"credentials into the environment"
        )
    bucket = re.fullmatch(r"[\w.-]+", parts.netloc, re.ASCII)
    if scheme not in SCHEMES or not bucket or not parts.path.strip("/") or "//" in parts.path.rstrip("/"):
        raise InputError(
            f"{setting}={place} must be a local folder, or a URL of a bucket and a folder in it: "
            f"{', '.join(f'{each}://BUCKET/FOLDER' for each in SCHEMES)}"
        )
    require_packages("obstore", extra="objects", needed_by=f"{setting}={place}")
    from eagle3.storage.object_store import Bucket

    return Bucket(str(place), setting=setting)


def write_file(storage: Storage, name: str, content: bytes, *, instead_of: str | None = WHATEVER) -> None:
    """Write a file whole or not at all."""
    file = storage.create(name, instead_of=instead_of)
    try:
        file.write(content)
        file.commit()
    finally:
        file.discard()
