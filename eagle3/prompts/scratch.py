"""How much room on disk the stage takes beside its result, told before it begins."""

import logging
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from eagle3.errors import InputError
from eagle3.prompts.reading.formats import Chunk, chunk_rows
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.scan import Task
from eagle3.prompts.spool import OWN_ROWS
from eagle3.storage.files import json_line

log = logging.getLogger(__name__)

SAMPLED = 1000  # rows of each source
PACKED, UNPACKED = (".gz", ".zst", ".parquet"), 5  # files of text are so many times as large when they are read
COPIES = 2  # of the prompts: as they were scanned, and as they are written


def tell_scratch(folder: Path, sources: list[Source], tasks: list[Task], dtype: np.dtype) -> int:
    """Log about how many bytes `folder` will take, and return it; dtype: what is compared about each row.

    On disk are the prompts twice, their rows, and for duplicates what near.py and spool.py keep as columns.
    """
    bands = dtype["bands"].shape[0]
    # Columns of text, id and bands; the runs of each band; which prompt is repeated; a candidate's number and links.
    row_bytes = OWN_ROWS.itemsize + dtype.itemsize + (8 + 8 + 8 * bands) + 8 * bands + 4 + (4 + 4 * bands)
    total = rows = 0
    for number, source in enumerate(sources):
        chunks = [task.chunk for task in tasks if task.source == number]
        size = sum(chunk.size * (UNPACKED if chunk.file.endswith(PACKED) else 1) for chunk in chunks)
        sample = _row_sizes(source, chunks[0]) if chunks else []
        found = size * len(sample) // max(sum(sample), 1)
        rows, total = rows + found, total + COPIES * size + row_bytes * found
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    level = logging.WARNING if total > free else logging.INFO
    log.log(
        level,
        "up to %s of scratch space in %s for about %d rows; %s are free",
        tqdm.format_sizeof(total, "B"),
        folder,
        rows,
        tqdm.format_sizeof(free, "B"),
    )
    return total


def _row_sizes(source: Source, chunk: Chunk) -> list[int]:
    """Return the bytes of some rows; of a file that cannot be read none, for the scan says so in its turn."""
    rows = islice(chunk_rows(chunk, source.shape.columns), SAMPLED)
    try:
        return [len(json_line(value)) for _, value in rows if isinstance(value, dict)]
    except (InputError, ValueError, TypeError):  # TypeError: of a table's dates and bytes, which JSON does not have
        return []
