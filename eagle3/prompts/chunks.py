"""The scratch file of a scanned chunk: a Parquet file with one row for every row of the chunk, in the same order.

It is written under a temporary name and renamed when complete. A run that was killed reuses the complete files.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
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


# A chunk's lines from 1, each with its row by column, of which those left out are null; None stands for a blank line.
RowsByLine = Iterable[tuple[int, dict[str, Any] | None]]


def band_names(bands: int) -> list[str]:
    return [f"band{band}" for band in range(bands)]


def kept_row(prompt: Prompt, signature: Signature, cell: int | None) -> dict[str, Any]:
    """Return the columns of a row that passed."""
    written = {"record": json_line(prompt.record()), "license": prompt.license or "", "origin": prompt.source}
    bands = zip(band_names(len(signature.bands)), signature.bands, strict=True)
    return {"id": prompt.id, **written, "cell": cell, **signature._asdict(), **dict(bands)}


def write_chunk(path: Path, bands: int, rows: RowsByLine, summary: dict[str, Any]) -> None:
    """Write the rows of a chunk, and `summary` with their counts. Keeps one row group in memory."""
    schema = pyarrow.schema([*ROWS, *COMPARED, *((name, pyarrow.uint64()) for name in band_names(bands))])
    repeated = ["license", "origin", "reason", "name"]
    options = {"compression": "zstd", "use_dictionary": repeated, "write_statistics": False}
    waiting: list[dict[str, Any]] = []
    rejected: Counter[str] = Counter()
    named: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by reason
    line = number = size = 0
    with atomic_write(path) as file, parquet.ParquetWriter(file, schema, **options) as table:
        for line, row in rows:
            if row is None:
                continue
            number += 1
            if (reason := row.get("reason")) is not None:
                rejected[reason] += 1
                if row["name"] is not None:
                    named[reason][row["name"]] += 1
            waiting.append({"line": line, **row})
            size += len(row.get("record", b""))
            if len(waiting) == GROUP_ROWS or size >= GROUP_BYTES:
                table.write_table(pyarrow.Table.from_pylist(waiting, schema=schema))
                waiting, size = [], 0
        if waiting:
            table.write_table(pyarrow.Table.from_pylist(waiting, schema=schema))
        prompts = number - rejected.total()
        summary = {**summary, "lines": line, "rows": number, "prompts": prompts, "rejected": rejected, "named": named}
        table.add_key_value_metadata({SUMMARY: json.dumps(summary, ensure_ascii=False)})


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
