"""A source whose rows are made while the stage runs, as many as pass what the stage checks."""

from collections import Counter
from typing import Protocol

from eagle3.prompts.reading.sources import Source


class GrowingSource(Protocol):
    """It comes before all other sources, so that the limit of all prompts does not cut it off."""

    def source(self) -> Source:
        """Return the source with the files that it has now, without a limit."""

    def wanted(self, others: int) -> int:
        """Return how many of its prompts are to be kept, next to `others` of the other sources."""

    def grow(self, kept: int, wanted: int, refused: Counter[str]) -> None:
        """Add files, because `wanted` prompts are not reached: `kept` of the rows so far are, the others were `refused`
        for these reasons. Raises InputError if more rows do not help."""
