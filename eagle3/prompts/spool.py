"""What the scan leaves on disk: a folder for each finished chunk, and the columns of all of them. N prompts.

A chunk's folder holds prompts.jsonl and rejects.jsonl, what is compared about each prompt (rows.bin, fixed width), and
counts (summary.json). It is written under another name and renamed: a folder that is there is whole.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eagle3.errors import InputError
from eagle3.prompts.pool import in_threads
from eagle3.prompts.reading.prompt import Prompt
from eagle3.storage.files import json_line, read_jsonl, sha256_file, with_filename
from eagle3.storage.records import read_sealed_json

OWN_ROWS = np.dtype([("offset", "u8"), ("line", "u8")])  # place in prompts.jsonl; line of the chunk, from 1
WAITING_ROWS = 1024  # rows that a chunk's writer holds
OPEN_FILES = 128  # of prompts read at random at a time


class ChunkWriter:
    """Takes the rows of one chunk; memory holds a thousand of them."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self.folder = folder
        self.dtype = np.dtype([*OWN_ROWS.descr, *dtype.descr])
        self.waiting: list[tuple] = []
        self.prompts = self.offset = 0
        self.rejected: Counter[str] = Counter()

    def __enter__(self) -> "ChunkWriter":
        self.files = {name: (self.folder / name).open("wb") for name in ("prompts.jsonl", "rejects.jsonl", "rows.bin")}
        return self

    def keep(self, line: int, prompt: Prompt, values: tuple) -> None:
        text = json_line(prompt.record())
        self.files["prompts.jsonl"].write(text)
        self.waiting.append((self.offset, line, *values))
        self.offset += len(text)
        self.prompts += 1
        if len(self.waiting) == WAITING_ROWS:
            self._flush()

    def reject(self, line: int, id: str | None, reason: str, text: str | None) -> None:
        """Take a refused row; `text` of those that people may look at."""
        self.rejected[reason] += 1
        row = {"line": line, "id": id, "reason": reason} | ({} if text is None else {"text": text})
        self.files["rejects.jsonl"].write(json_line(row))

    def _flush(self) -> None:
        self.files["rows.bin"].write(np.array(self.waiting, dtype=self.dtype).tobytes())
        self.waiting.clear()

    def __exit__(self, *_: object) -> None:
        self._flush()
        for file in self.files.values():
            file.close()


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write into, which gets the name `folder` when the block ends well."""
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with with_filename(temporary):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            if not folder.exists():  # a worker that outlived a killed run may have written it
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class ScannedChunk:
    """A finished chunk. `summary`: its file's name, start there, lines, rows, prompts, rejected (by reason), counts (by
    check), and the sha256 of its other files."""

    folder: Path
    source: int  # its place in the list of sources
    dtype: np.dtype
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, source: int, dtype: np.dtype) -> "ScannedChunk":
        summary = read_sealed_json(folder / "summary.json", made_by="the prompts stage")
        return cls(folder, source, np.dtype([*OWN_ROWS.descr, *dtype.descr]), summary)

    def require_whole(self) -> None:
        """Raise InputError where a file is not the one that was written."""
        for name, expected in self.summary["sha256"].items():
            path = self.folder / name
            if not path.is_file() or sha256_file(path) != expected:
                raise InputError(f"{path} is damaged or was edited")

    @property
    def prompts(self) -> int:
        return self.summary["prompts"]

    def rows(self) -> np.ndarray:
        """Map the rows, which stay on disk."""
        if not self.prompts:
            return np.zeros(0, dtype=self.dtype)
        return np.asarray(np.memmap(self.folder / "rows.bin", mode="r", dtype=self.dtype))

    def lines(self) -> Iterator[bytes]:
        with (self.folder / "prompts.jsonl").open("rb") as file:
            yield from file

    def rejects(self) -> Iterator[dict]:
        return read_jsonl(self.folder / "rejects.jsonl")


class Scanned:
    """All prompts of the chunks that are used, in their order, numbered from 0."""

    def __init__(self, chunks: list[ScannedChunk]):
        self.chunks = chunks
        self.starts = np.array([0, *accumulate(chunk.prompts for chunk in chunks)])
        self.open: dict[int, tuple[Any, np.ndarray]] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "open": {}}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def parts(self) -> Iterator[tuple[ScannedChunk, slice]]:
        """Yield each chunk with the numbers of its prompts, from and to."""
        for chunk, (start, end) in zip(self.chunks, pairwise(self.starts.tolist()), strict=True):
            yield chunk, slice(start, end)

    def source_starts(self, sources: int) -> np.ndarray:
        """Return the number of the first prompt of each source, and N."""
        counts = np.zeros(sources, dtype=np.int64)
        for chunk in self.chunks:
            counts[chunk.source] += chunk.prompts
        return np.concatenate([[0], np.cumsum(counts)])

    def columns(self, folder: Path, name: str, *, threads: int) -> list["Column"]:
        """Write a field of all rows into files of its own, one for each of the field's values."""
        kind = self.chunks[0].dtype[name] if self.chunks else np.dtype("u8")
        count = int(np.prod(kind.shape))
        columns = [Column(folder / f"{name}.{place}", kind.base, (len(self),)) for place in range(count)]
        written = [column.zeros() for column in columns]

        def copy(part: tuple[ScannedChunk, slice]) -> None:
            chunk, numbers = part
            values = chunk.rows()[name].reshape(chunk.prompts, count)
            for place, column in enumerate(written):
                column[numbers] = values[:, place]

        in_threads(copy, self.parts(), threads)
        return columns

    def prompt(self, number: int) -> dict:
        """Read one prompt again."""
        index = int(np.searchsorted(self.starts, number, side="right")) - 1
        if index not in self.open:
            if len(self.open) >= OPEN_FILES:
                self.open.pop(next(iter(self.open)))[0].close()
            chunk = self.chunks[index]
            self.open[index] = (chunk.folder / "prompts.jsonl").open("rb"), chunk.rows()["offset"].copy()
        file, offsets = self.open[index]
        file.seek(int(offsets[number - self.starts[index]]))
        return json.loads(file.readline())

    def __enter__(self) -> "Scanned":
        return self

    def __exit__(self, *_: object) -> None:
        for file, _offsets in self.open.values():
            file.close()
        self.open.clear()


@dataclass(frozen=True)
class Column:
    """A value, or some, of every prompt, on disk. The system and not the process holds them."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]

    def zeros(self) -> np.ndarray:
        """Make the file; parts that are not touched cost nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self._mapped("w+")

    def values(self, *, writable: bool = False) -> np.ndarray:
        """Map the values, read as they are used; let go of them to give their memory back."""
        return self._mapped("r+" if writable else "r")

    def _mapped(self, mode: Literal["w+", "r+", "r"]) -> np.ndarray:
        if 0 in self.shape:  # an empty file cannot be mapped
            return np.zeros(self.shape, dtype=self.dtype)
        return np.asarray(np.memmap(self.path, mode=mode, dtype=self.dtype, shape=self.shape))
