"""A cache on the local disk for a folder that is read over a network, shared by all processes of a machine.

It keeps what was read in sparse files, one for each file of the folder, at the same offsets, and no list of these:
cached bytes are used if they have the sha256 that the reader expects, else they are fetched and stored. So kills,
restarts, full disks and flipped bits cost only time, and processes need not coordinate.
"""

import hashlib
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from eagle3.errors import InputError
from eagle3.storage.folder import Readable

log = logging.getLogger(__name__)
LOCK = ".lock"


class CachedFolder:
    """A `Readable` whose ranges with a sha256 are kept below `path`, in `limit` bytes with everything else there.

    Over the limit, the files that were read from longest ago are deleted.
    """

    remote = True

    def __init__(self, storage: Readable, path: Path, *, limit: int) -> None:
        self.storage, self.location, self.root, self.limit = storage, storage.location, path, limit
        self.path = path / hashlib.sha256(storage.location.encode()).hexdigest()[:32]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"data.cache_dir={path}: {error.strerror}; give a folder that you may write to, or leave it out"
            ) from None
        self._until_check = 0  # bytes that may be written before the next look at the limit
        self._counting = threading.Lock()
        self._failed = False

    def size(self, name: str) -> int:
        return self.storage.size(name)

    def read(self, name: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> memoryview:
        if sha256 is None or stop is None:
            return self.storage.read(name, start, stop, sha256=sha256)
        content = self._kept(name, start, stop)
        if content is None or hashlib.sha256(content).hexdigest() != sha256:
            content = self.storage.read(name, start, stop, sha256=sha256)
            self._keep(name, start, content)
        return content

    def _kept(self, name: str, start: int, stop: int) -> memoryview | None:
        try:
            with (self.path / name).open("rb", buffering=0) as file:
                if os.lseek(file.fileno(), start, os.SEEK_DATA) >= stop:  # a hole: no need to read zeros
                    return None
                with suppress(OSError):  # a cache that may only be read
                    os.utime(file.fileno())
                content = memoryview(bytearray(stop - start))
                file.seek(start)
                return content if file.readinto(content) == len(content) else None
        except OSError:  # not there, a hole up to its end, or a disk that fails
            return None

    def _keep(self, name: str, start: int, content: memoryview) -> None:
        with self._counting:
            self._until_check -= len(content)
            check = self._until_check < 0
        try:
            if check:
                self._make_room(len(content))
            with os.fdopen(os.open(self.path / name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.seek(start)
                file.write(content)
        except OSError as error:
            if not self._failed:
                # Not a warning, which only the first rank shows: this is about one machine.
                log.error("data.cache_dir=%s: %s; what it cannot hold is fetched again", self.root, error.strerror)
            self._failed = True

    def _make_room(self, size: int) -> None:
        """Delete files until an eighth of the limit is free."""
        room = self.limit // 8
        with suppress(Timeout), FileLock(self.root / LOCK, timeout=0):  # else another process is at it
            files = [(found.stat(), found) for found in self.root.glob("*/*")]
            used = sum(facts.st_blocks * 512 for facts, _ in files)
            for facts, found in sorted(files, key=lambda each: each[0].st_mtime_ns):
                if used + max(room, size) <= self.limit:
                    break
                found.unlink(missing_ok=True)
                used -= facts.st_blocks * 512
        with self._counting:
            self._until_check = room // 16  # what each of 16 processes may write before the next look
