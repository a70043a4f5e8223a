"""The scratch file of a scanned chunk: a Parquet file with one row for every row of the chunk, in the same order.

It is written under a temporary name and renamed when complete. A run that was killed reuses the complete files.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from eagle3.prompts.overlap.duplicates import Signature
from eagle3.prompts.reading.prompt import Prompt
from eagle3.storage.files import atomic_write, json_line

ROWS = [  # for the stage's output files
    ("line", pyarrow.int64()),  # of the chunk, from 1
    ("id", pyarrow.string()),
    ("reason", pyarrow.string()),  # null: the row passed all checks
    ("name", pyarrow.string()),  # that the reason is about
    ("record", pyarrow.binary()),  # the prompt as a line of JSON
    ("license", pyarrow.string()),
    ("origin", pyarrow.string()),  # the prompt's `source`
]
COMPARED = [  # for the selection; only rows that passed have them
    ("id_hash", pyarrow.uint64()),
    ("text_hash", pyarrow.uint64()),
    ("mode_hash", pyarrow.uint64()),
    ("opening_hash", pyarrow.uint64()),
    ("shingles", pyarrow.list_(pyarrow.uint64())),
    ("answers", pyarrow.list_(pyarrow.uint64())),  # the shingles of kept answers
    ("cell", pyarrow.int32()),  # of the traffic mix
]
SUMMARY = "summary"
READING = "reading"  # the section of counts with how rows were read
GROUP_ROWS, GROUP_BYTES = 4096, 4_000_000  # limits of a row group, which is kept in memory; its last row may be longer


def band_names(bands: int) -> list[str]:
    return [f"band{band}" for band in range(bands)]


class ChunkWriter:
    """Writes the rows of a chunk; keeps one row group in memory."""

    def __init__(self, file: parquet.ParquetWriter):
        self.file = file
        self.waiting: list[dict[str, Any]] = []  # by column; a column that is left out is null
        self.lines = self.prompts = self.bytes_waiting = 0
        self.rejected: Counter[str] = Counter()
        self.named: dict[str, Counter[str]] = {}  # by reason

    def keep(self, line: int, prompt: Prompt, signature: Signature, cell: int | None) -> None:
        self.prompts += 1
        written = {"record": json_line(prompt.record()), "license": prompt.license or "", "origin": prompt.source}
        hashes = {"id_hash": signature.id, "text_hash": signature.text, "mode_hash": signature.mode}
        hashes["opening_hash"] = signature.opening
        compared = {**hashes, "shingles": signature.shingles, "answers": signature.answers, "cell": cell}
        bands = dict(zip(band_names(len(signature.bands)), signature.bands, strict=True))
        self._add({"line": line, "id": prompt.id, **written, **compared, **bands}, len(written["record"]))

    def reject(self, line: int, id: str | None, reason: str, name: str | None) -> None:
        self.rejected[reason] += 1
        if name is not None:
            self.named.setdefault(reason, Counter())[name] += 1
        self._add({"line": line, "id": id, "reason": reason, "name": name}, 0)

    def _add(self, row: dict[str, Any], size: int) -> None:
        self.waiting.append(row)
        self.bytes_waiting += size
        if len(self.waiting) == GROUP_ROWS or self.bytes_waiting >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        self.file.write_table(pyarrow.Table.from_pylist(self.waiting, schema=self.file.schema))
        self.waiting.clear()
        self.bytes_waiting = 0

    def finish(self, **summary: Any) -> None:
        """Write the rows that wait, and the summary."""
        if self.waiting:
            self._flush()
        rows = self.prompts + self.rejected.total()
        summary |= {"lines": self.lines, "rows": rows, "prompts": self.prompts}
        summary |= {"rejected": self.rejected, "named": self.named}
        self.file.add_key_value_metadata({SUMMARY: json.dumps(summary, ensure_ascii=False)})


@contextmanager
def chunk_writer(path: Path, bands: int) -> Iterator[ChunkWriter]:
    """Open a chunk's file; it gets its name when the block ends well, else it is removed."""
    schema = pyarrow.schema([*ROWS, *COMPARED, *((name, pyarrow.uint64()) for name in band_names(bands))])
    repeated = ["license", "origin", "reason", "name"]
    options = {"compression": "zstd", "use_dictionary": repeated, "write_statistics": False}
    with atomic_write(path) as file, parquet.ParquetWriter(file, schema, **options) as table:
        yield ChunkWriter(table)


@dataclass(frozen=True)
class ScannedChunk:
    """A scanned chunk. `summary`: file, start, lines, rows, prompts, rejected (by reason), named (by reason and name),
    counts (by check)."""

    path: Path
    source: int  # its index in the list of sources
    summary: dict[str, Any]

    @classmethod
    def read(cls, path: Path, source: int) -> "ScannedChunk":
        with parquet.ParquetFile(path) as file:
            return cls(path, source, json.loads(file.metadata.metadata[SUMMARY.encode()]))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the columns for the stage's output files, row by row."""
        with parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=1024, columns=[name for name, _ in ROWS]):
                yield from batch.to_pylist()
