"""File formats of sources, cut into chunks that a worker opens by itself. Local paths and fsspec URLs."""

import io
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import fsspec

from eagle3.errors import InputError
from eagle3.prompts.reading.shapes import from_json
from eagle3.secrets import without_query

BLOCK = 1 << 20  # bytes per request to a remote store; fsspec's default of 50 MB would fetch chunks many times
NO_END = 1 << 62
HEAD = 4096  # bytes in which a JSON array must start

BLANK = object()  # stands for a blank line: it is no row, but it counts as a line
Names = Container[str]  # of the columns that are read, in lower case
Rows = Iterator[tuple[int, Any]]  # (line within the chunk, from 1; the row's value, None when it is not JSON, or BLANK)


@dataclass(frozen=True)
class Chunk:
    """A part of a file: bytes [start, end) of lines, or row groups of Parquet."""

    file: str
    start: int
    end: int
    size: int  # in bytes, for progress; 0 if not known


class Format(NamedTuple):
    cut: Callable[[str, int], Iterator[Chunk]]  # file, bytes of a chunk
    rows: Callable[[Chunk, Names], Rows]


def has_ending(file: str, endings: Iterable[str]) -> bool:
    return without_query(file).lower().endswith(tuple(endings))


def _format_of(file: str) -> Format:
    return next(found for ending, found in FORMATS.items() if has_ending(file, [ending]))


def cut(file: str, chunk_bytes: int) -> list[Chunk]:
    """Return the chunks of a file, in its order; they depend on the file and `chunk_bytes` alone."""
    return list(_format_of(file).cut(file, chunk_bytes))


def chunk_rows(chunk: Chunk, names: Names) -> Rows:
    """Yield the rows of a chunk; keeps one row, one batch, or one whole JSON array in memory.

    Parquet is read only in the columns `names`.
    """
    return _format_of(chunk.file).rows(chunk, names)


def _opened(file: str) -> io.BufferedReader:
    files, path = fsspec.core.url_to_fs(file)
    return io.BufferedReader(files.open(path, "rb", block_size=BLOCK), BLOCK)


def _cut_lines(file: str, chunk_bytes: int) -> Iterator[Chunk]:
    files, path = fsspec.core.url_to_fs(file)
    info = files.info(path)
    size = info["size"]
    if size is None or info.get("partial") is False:  # web servers that give no size, or send whole files only
        yield Chunk(file, 0, NO_END, size or 0)
        return
    for start in range(0, max(size, 1), chunk_bytes):
        end = min(start + chunk_bytes, size)
        yield Chunk(file, start, end, end - start)


def _line_rows(chunk: Chunk, names: Names) -> Rows:
    """Yield the lines that begin in [start, end); the last one may run past the end."""
    try:
        with _opened(chunk.file) as file:
            position = chunk.start
            if position:
                file.seek(position - 1)
                position += len(file.readline()) - 1
            line = 0
            while position < chunk.end and (text := file.readline()):
                line, position = line + 1, position + len(text)
                yield line, from_json(text) if text.strip() else BLANK
    except (OSError, ValueError) as error:  # stores raise these if the connection breaks
        raise _unreadable(chunk.file, error) from None


def _cut_whole(file: str, chunk_bytes: int) -> Iterator[Chunk]:
    return _cut_lines(file, NO_END)


def _packed_rows(chunk: Chunk, names: Names) -> Rows:
    """Yield lines, or a JSON array, of a gzip or zstd file, which is always one chunk."""
    import pyarrow

    packing = "gzip" if has_ending(chunk.file, [".gz"]) else "zstd"
    try:
        with _opened(chunk.file) as packed, pyarrow.CompressedInputStream(packed, packing) as file:
            lines = io.BufferedReader(file, BLOCK)
            if ".json." in without_query(chunk.file).lower() and _starts_array(lines):
                yield from _array_rows(chunk.file, lines)
            else:
                yield from ((line, from_json(text) if text.strip() else BLANK) for line, text in enumerate(lines, 1))
    except OSError as error:
        raise _unreadable(chunk.file, error) from None


def _cut_json(file: str, chunk_bytes: int) -> Iterator[Chunk]:
    with _opened(file) as content:
        return _cut_whole(file, chunk_bytes) if _starts_array(content) else _cut_lines(file, chunk_bytes)


def _json_rows(chunk: Chunk, names: Names) -> Rows:
    with _opened(chunk.file) as file:
        return _array_rows(chunk.file, file) if _starts_array(file) else _line_rows(chunk, names)


def _starts_array(file: io.BufferedReader) -> bool:
    return file.peek(HEAD).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _array_rows(file: str, content: io.BufferedReader) -> Rows:
    rows = from_json(content.read())
    if rows is None:
        raise InputError(f"{file} starts like a JSON array but is not valid JSON; fix it or write one object a line")
    return enumerate(rows, 1)


@contextmanager
def _table(file: str) -> Iterator[Any]:
    """Open a Parquet file. Raises InputError if it is damaged."""
    import pyarrow.parquet

    try:
        with _opened(file) as content, pyarrow.parquet.ParquetFile(content) as table:
            yield table
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # the last for dates past 9999
        raise _unreadable(file, error) from None


def _cut_parquet(file: str, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield runs of row groups that together have about `chunk_bytes`."""
    with _table(file) as table:
        sizes = [table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)]
    start = total = 0
    for number, size in enumerate(sizes, 1):
        total += size
        if total >= chunk_bytes or number == len(sizes):
            yield Chunk(file, start, number, total)
            start, total = number, 0


def _parquet_rows(chunk: Chunk, names: Names) -> Rows:
    with _table(chunk.file) as table:
        columns = [column for column in table.schema_arrow.names if column.lower() in names]
        groups = list(range(chunk.start, chunk.end))
        batches = table.iter_batches(batch_size=1024, row_groups=groups, columns=columns, use_threads=False)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def _unreadable(file: str, error: Exception) -> InputError:
    return InputError(
        f"{file} is damaged, not what its ending says, or cannot be read ({type(error).__name__}); "
        f"fetch or write it again"
    )


PLAIN = (".jsonl", ".ndjson", ".json")  # read without pyarrow
LINES = Format(_cut_lines, _line_rows)
PACKED_LINES = Format(_cut_whole, _packed_rows)
FORMATS = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": Format(_cut_json, _json_rows),
    ".parquet": Format(_cut_parquet, _parquet_rows),
    **{f"{lines}{packing}": PACKED_LINES for lines in PLAIN for packing in (".gz", ".zst")},
}
