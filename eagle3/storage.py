"""Files that are whole or absent, the storage that holds them, and records: what lies on disk as plain data."""

import hashlib
import json
import mmap
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import IO, Any, ClassVar, Protocol, TypeVar

from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter, ValidationError

from eagle3.errors import InputError


def require_local(path: str, *, setting: str) -> None:
    """Raise InputError for a URL: as a path it would name a folder below the working directory."""
    if "://" in path:
        raise InputError(
            f"{setting}={path} is a URL, and must be a local folder; mount the bucket, or copy the folder from and to "
            f"it with its own tool, e.g. aws s3 sync"
        )


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
        error.filename = error.filename or str(path)
        raise


def write_json(path: Path, value: Any) -> None:
    with atomic_write(path) as file:
        file.write(_json_text(value))


def _json_text(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def read_json(path: Path, *, made_by: str) -> dict[str, Any]:
    """Parse an object; `made_by` is the command that makes the file, named when it is missing or broken."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; make it with: {made_by}") from None
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise InputError(f"{path} is not valid JSON ({error}); delete it and run: {made_by}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no object in braces; delete it and run: {made_by}")
    return value


def write_jsonl(path: Path, rows: Iterator[dict] | list[dict]) -> None:
    with atomic_write(path) as file:
        for row in rows:
            file.write(json_line(row))


def json_line(row: dict) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def read_jsonl(path: Path) -> Iterator[dict]:
    """Rows of a file that this project wrote by appending: a last line cut short by a kill is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if not isinstance(row, dict):
                    raise InputError(f"{path} line {number} is damaged: it holds no JSON object; make the file again")
                yield row


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- seals -----------------------------------------------------------------------------------------------------------
# A file of JSON whose last key is the sha256 of what stands before it: a flipped byte, a cut and an edit all show.

SEAL = re.compile(rb',\n "seal": "([0-9a-f]{64})"\n\}\n')


def seal(text: bytes) -> bytes:
    """Add the seal to a JSON object of one or more keys, indented by 1."""
    body = text.removesuffix(b"\n}\n")
    assert body != text
    return body + b',\n "seal": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def unseal(content: bytes, *, source: str, way_out: str) -> bytes:
    """Return the JSON without its seal; InputError where they do not fit together."""
    body, found = content[:-LENGTH_OF_SEAL], SEAL.fullmatch(content[-LENGTH_OF_SEAL:])
    if found is None or found[1].decode() != hashlib.sha256(body).hexdigest():
        raise InputError(f"{source}: damaged or edited, it does not have the sha256 in its last line; {way_out}")
    return body + b"\n}\n"


LENGTH_OF_SEAL = len(seal(b"{1\n}\n")) - 2


def write_sealed_json(path: Path, value: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write(seal(_json_text(value)))


def read_sealed_json(path: Path, *, made_by: str) -> dict[str, Any]:
    """Parse what `write_sealed_json` wrote; errors as in `read_json`."""
    value = read_json(path, made_by=made_by)
    unseal(path.read_bytes(), source=str(path), way_out=f"delete it and run: {made_by}")
    del value["seal"]
    return value


# --- records ---------------------------------------------------------------------------------------------------------

UNION_PARTS = ("str", "list[str]", "[key]")  # in the places that pydantic names


class Record:
    """A frozen dataclass that is written as JSON. What is read is checked against its fields: nothing may be missing,
    unknown or of another type. One with a FORMAT_VERSION has a field `format_version` of the same number."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    FORMAT_VERSION: ClassVar[int | None] = None


AnyRecord = TypeVar("AnyRecord", bound=Record)


def parse_record(content: bytes, kind: type[AnyRecord], *, source: str, way_out: str) -> AnyRecord:
    """Read a record from JSON. InputError names `source`, the field, what is wrong with it and the `way_out`."""
    _require_version(content, kind, source, way_out)
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        raise InputError(f"{source}: {_in_words(error.errors()[0])}; {way_out}") from None


def parse_sealed(content: bytes, kind: type[AnyRecord], *, source: str, way_out: str) -> AnyRecord:
    """Read a record from a file of its own. What another version or program wrote is said as such."""
    _require_version(content, kind, source, way_out)
    if SEAL.fullmatch(content[-LENGTH_OF_SEAL:]) is None:
        parse_record(content, kind, source=source, way_out=way_out)
    return parse_record(unseal(content, source=source, way_out=way_out), kind, source=source, way_out=way_out)


def _require_version(content: bytes, kind: type[Record], source: str, way_out: str) -> None:
    try:
        version = json.loads(content)["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # for the seal or the parser to say
    if isinstance(version, int) and version != kind.FORMAT_VERSION is not None:
        raise InputError(f"{source}: format_version={version}, this code reads {kind.FORMAT_VERSION}; {way_out}")


def _in_words(fault: Mapping[str, Any]) -> str:
    """Say what is wrong in which field; of its value only numbers, for texts may be somebody's."""
    field = ".".join(str(part) for part in fault["loc"] if part not in UNION_PARTS)
    if fault["type"] == "missing":
        return f"{field} is missing"
    if fault["type"] == "unexpected_keyword_argument":
        return f"{field} is unknown"
    given = f"={fault['input']}" if isinstance(fault["input"], int | float | NoneType) else ""
    return f"{field}{given}: {fault['msg']}" if field else fault["msg"].removeprefix("Value error, ")


def record_bytes(record: Record) -> bytes:
    return TypeAdapter(type(record)).dump_json(record, indent=1) + b"\n"


def sealed_bytes(record: Record) -> bytes:
    """Return a record as a file of its own, which `parse_sealed` reads."""
    return seal(record_bytes(record))


# --- storage ---------------------------------------------------------------------------------------------------------


class PendingFile(Protocol):
    """A file that is being written and has no name yet."""

    def write(self, data: Any) -> int: ...

    def tell(self) -> int: ...

    def commit(self) -> None:
        """Give the file its name: from here on it is there, whole."""

    def discard(self) -> None:
        """Drop the file; nothing was there and nothing is. Does nothing after `commit`."""


class Storage(Protocol):
    """A folder of files that are whole or absent. Names have no folders. Errors are OSErrors with a `filename`; a name
    that is not there is a FileNotFoundError."""

    @property
    def location(self) -> str:
        """Path or URL, for messages and records."""

    def names(self, pattern: str) -> list[str]:
        """List the files that match a glob pattern, sorted."""

    def size(self, name: str) -> int: ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the bytes of a range, all by default. Safe to call from several threads."""

    def create(self, name: str) -> PendingFile:
        """Begin a file, which appears under `name` when it is committed and replaces one of that name."""


class LocalFolder:
    """A folder on this machine. Ranges are views of the mapped file: what is never looked at is never read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._mapped: dict[str, memoryview] = {}

    @property
    def location(self) -> str:
        return str(self.path)

    def names(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.path.glob(pattern))

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def read(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        if name not in self._mapped:  # two threads may both map a file; the second view stays
            self._mapped[name] = self._map(self.path / name)
        return self._mapped[name][start:stop]

    def create(self, name: str) -> "LocalPendingFile":
        self.path.mkdir(parents=True, exist_ok=True)
        self._mapped.pop(name, None)
        return LocalPendingFile(self.path / name)

    @staticmethod
    def _map(path: Path) -> memoryview:
        with path.open("rb") as file:
            if not path.stat().st_size:
                return memoryview(b"")
            # Copy on write: torch warns of tensors in read-only memory, and the file must never change.
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


class LocalPendingFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.file = self.temporary.open("wb")

    def write(self, data: Any) -> int:
        with with_filename(self.path):
            return self.file.write(data)

    def tell(self) -> int:
        return self.file.tell()

    def commit(self) -> None:
        with with_filename(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.temporary.replace(self.path)

    def discard(self) -> None:
        with suppress(OSError):  # on a full disk closing fails as writing did
            self.file.close()
        self.temporary.unlink(missing_ok=True)


def write_file(storage: Storage, name: str, content: bytes) -> None:
    """Write a file whole or not at all."""
    file = storage.create(name)
    try:
        file.write(content)
        file.commit()
    finally:
        file.discard()


def sha256_stored(storage: Storage, name: str) -> str:
    return hashlib.sha256(storage.read(name)).hexdigest()


# --- one writer at a time --------------------------------------------------------------------------------------------

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
