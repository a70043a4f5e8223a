"""Which of the prompts that passed the checks are kept: no duplicates, the limits, the traffic mix."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from eagle3.prompts.overlap.duplicates import Choice, Duplicates, Fate
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.spool import Scanned
from eagle3.prompts.traffic import TrafficMix


@dataclass(frozen=True)
class Selection:
    choice: Choice
    source_starts: np.ndarray  # number of the first prompt of each source, and N
    traffic: dict | None  # the report of the mix

    def unique(self) -> np.ndarray:
        """Count each source's prompts within its limit that repeat none: mix and limit take of these."""
        unique = ~np.isin(self.choice.fate, (*REPEATING, Fate.SOURCE_LIMIT))
        return np.array([unique[start:end].sum() for start, end in pairwise(self.source_starts)])

    def reason(self, number: int) -> str:
        fate = Fate(self.choice.fate[number])
        across = fate in REPEATING and self._source(number) != self._source(int(self.choice.repeats[number]))
        return REASONS[fate] + (" of another source" if across else "")

    def reasons(self, numbers: slice) -> list[str | None]:
        """Return why each of these prompts is not kept, None for those that are."""
        fates = self.choice.fate[numbers].tolist()
        return [None if fate == Fate.KEPT else self.reason(number) for number, fate in enumerate(fates, numbers.start)]

    def _source(self, number: int) -> int:
        return int(np.searchsorted(self.source_starts, number, side="right"))


REASONS = {
    Fate.EXACT: "exact duplicate",
    Fate.ID: "duplicate id",
    Fate.NEAR: "near duplicate",
    Fate.SOURCE_LIMIT: "past the limit of the source",
    Fate.MIX: "not drawn for the traffic mix",
    Fate.LIMIT: "past prompts.limit",
}
REPEATING = (Fate.EXACT, Fate.ID, Fate.NEAR)


def select(
    scanned: Scanned,
    sources: list[Source],
    *,
    duplicates: Duplicates,
    traffic: TrafficMix | None,
    sample: np.ndarray | None,
    limit: int | None,
    folder: Path,
    processes: int,
) -> Selection:
    """Apply duplicates and the sources' limits, the mix, and the limit over all, in this order.

    `folder` takes what is large."""
    starts = scanned.source_starts(len(sources))
    choice = _unique_within_limits(scanned, sources, starts, duplicates, folder, processes)
    report = None
    if traffic is not None:
        kept = np.flatnonzero(choice.fate == Fate.KEPT)
        [measured] = scanned.columns(folder, "traffic", threads=processes)
        drawn, report = traffic.choose(measured.values()[kept], sample=sample)
        choice.fate[kept[~drawn]] = Fate.MIX
    if limit is not None:
        choice.fate[np.flatnonzero(choice.fate == Fate.KEPT)[limit:]] = Fate.LIMIT
    return Selection(choice, starts, report)


def _unique_within_limits(
    scanned: Scanned,
    sources: list[Source],
    starts: np.ndarray,
    duplicates: Duplicates,
    folder: Path,
    processes: int,
) -> Choice:
    """Leave out what is past a source's limit and do all again: it must not make later prompts duplicates."""
    chosen = np.ones(len(scanned), dtype=bool)
    choice = duplicates.find(scanned, chosen, folder, processes=processes)
    for number, source in enumerate(sources):
        kept = np.flatnonzero(choice.fate[starts[number] : starts[number + 1]] == Fate.KEPT) + starts[number]
        if source.limit is not None and len(kept) > source.limit:
            chosen[kept[source.limit] : starts[number + 1]] = False
            choice = duplicates.find(scanned, chosen, folder, processes=processes)
    return choice
