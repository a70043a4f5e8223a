"""Batches for a forward of the target: rows are padded to the longest of their batch."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Row = TypeVar("Row")


def batches_by_tokens(
    rows: Iterable[Row], length: Callable[[Row], int], *, most_tokens: float, most_rows: int | None = None
) -> Iterator[list[Row]]:
    """Cut rows, which are sorted by length, into batches of at most `most_tokens` tokens with their padding.

    A row that is longer than that is a batch of its own."""
    batch: list[Row] = []
    longest = 0
    for row in rows:
        longest = max(longest, length(row))
        if batch and (len(batch) == most_rows or (len(batch) + 1) * longest > most_tokens):
            yield batch
            batch, longest = [], length(row)
        batch.append(row)
    if batch:
        yield batch
