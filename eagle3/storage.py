"""Files that are whole or absent: temporary name then rename, JSON, JSON Lines, content hashes."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with with_filename(path), temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
        file.write(json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")


def read_json(path: Path, *, made_by: str) -> Any:
    """Parse `path`; `made_by` is the command that makes it, named when it is missing or broken."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; make it with: {made_by}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON ({error}); delete it and run: {made_by}") from None


def write_jsonl(path: Path, rows: Iterator[dict] | list[dict]) -> None:
    with atomic_write(path) as file:
        for row in rows:
            file.write(json_line(row))


def json_line(row: dict) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def read_jsonl(path: Path) -> Iterator[dict]:
    """Rows of a file that this project wrote by appending: a last line cut short by a kill is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
