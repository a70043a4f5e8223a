"""Local files that are whole or absent, JSON, and hashes."""

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from eagle3.errors import InputError

WHATEVER = "*"  # replace any version
# For `glob`, without ._NAME, which macOS adds to copies and servers do not read.
WEIGHTS, CHECKPOINTS = "[!.]*.safetensors", "[!.]*.ckpt"


def require_regular(path: Path, *, named: str) -> None:
    """Raise InputError for a pipe, socket or device: reading one may wait for ever, and gives its content once."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{named} is no regular file but a pipe, socket or device; give a file on a disk")


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open `path` for binary writing under a temporary name; it gets its own name only when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pending = LocalPendingFile(path)
    try:
        with with_filename(path):
            yield pending.file
        pending.commit()
    finally:
        pending.discard()


@contextmanager
def with_filename(path: Path) -> Iterator[None]:
    """Put `path` into an OSError of writing: Python does so at opening only, not when the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # pyarrow's have a message instead
            error.filename = error.filename or str(path)
        raise


def write_whole(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json_text(value))


def json_text(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def read_json(path: Path, *, made_by: str) -> dict[str, Any]:
    """Parse an object; `made_by` is the command that makes the file, named when it is missing or broken."""
    if path.exists() and not path.is_file():  # a pipe would be read for ever
        raise InputError(f"{path} is no file; move it away, then: {made_by}")
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; make it with: {made_by}") from None
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise InputError(f"{path} is not valid JSON ({error}); move it away, then: {made_by}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no object in braces; move it away, then: {made_by}")
    return value


def write_jsonl(path: Path, rows: Iterator[dict] | list[dict]) -> None:
    with atomic_write(path) as file:
        for row in rows:
            file.write(json_line(row))


def json_line(row: dict) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def append_lines(path: Path, lines: bytes) -> None:
    """Add whole lines to a file and see them on disk."""
    with with_filename(path), path.open("ab") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: Path) -> Iterator[dict]:
    """Rows of a file that this project wrote by appending: a last line cut short by a kill is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    row = json.loads(line)
                except ValueError:
                    raise InputError(
                        f"{path} line {number} is damaged: it holds no JSON; make the file again"
                    ) from None
                yield row


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def temporary_name(name: str, made_up: str) -> str:
    """Return the name of a file until it gets its own."""
    return f".{name}.{made_up}.tmp"


class LocalPendingFile:
    """A file that is written under a temporary name and gets its own name when it is committed."""

    def __init__(
        self,
        path: Path,
        *,
        check: Callable[[], object] = lambda: None,
        exclusive: bool = False,
        committed: Callable[[], object] = lambda: None,
    ) -> None:
        """`exclusive`: `commit` raises FileExistsError if the name is taken, also by a writer of the same moment."""
        self.path, self.check, self.exclusive, self.committed = path, check, exclusive, committed
        self.temporary = path.with_name(temporary_name(path.name, secrets.token_hex(4)))  # nodes may have equal pids
        self.file = self.temporary.open("wb")

    def write(self, data: Any) -> int:
        with with_filename(self.path):
            return self.file.write(data)

    def commit(self) -> None:
        with with_filename(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.check()
            if self.exclusive:
                self._take_free_name()
            else:
                self.temporary.replace(self.path)
        self.committed()

    def _take_free_name(self) -> None:
        """Make a hard link, which fails if the name is taken; renaming would replace the other file.

        Where links fail (exFAT, SMB mounts, gcsfuse), rename under a lock, which a killed process gives back. If locks
        do not reach other machines either, two of them can still overwrite each other's file between check and rename.
        """
        try:
            os.link(self.temporary, self.path)
        except FileExistsError:
            raise written_by_another(self.path) from None
        except OSError:
            with FileLock(self.path.with_name(".rename.lock")):
                if self.path.exists():
                    raise written_by_another(self.path) from None
                self.temporary.replace(self.path)
        else:
            self.temporary.unlink()

    def discard(self) -> None:
        with suppress(OSError):  # on a full disk closing fails as writing did
            self.file.close()
        self.temporary.unlink(missing_ok=True)


def written_by_another(path: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "another process has written it", str(path))
