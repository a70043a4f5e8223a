"""Which prompts to keep so that their mix looks like production traffic: quotas by stratum, raking inside. N rows.

Strata are the joint bins of a few features: each gets its quota. Inside a stratum prompts are drawn, without
replacement, so that the other features come as near to the target as the pool allows; with a sample, also the finer
bins of numbers. What the pool lacks is not made up for by other strata: the draw gets smaller and stays nearer to the
target.
"""

import logging

import numpy as np

from eagle3.errors import InputError
from eagle3.prompts.language import LanguageDetector
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.traffic.features import measure
from eagle3.prompts.traffic.grid import Grid, features
from eagle3.prompts.traffic.raking import effective_sample_size, missing_share, rake, whole_counts
from eagle3.prompts.traffic.report import feature_mixes, shortfall_line, table_distances, unfilled
from eagle3.prompts.traffic.target import Table, margins_of, read_histogram, sample_tables

log = logging.getLogger(__name__)


class TrafficMix:
    """What conf/prompts/traffic says: `measure` runs in the scan, `choose` once over all rows.

    sample: where production prompts are, in any shape and format of a source; the caller reads and measures them.
    """

    def __init__(
        self,
        *,
        sample: str | None,
        histogram: str | None,
        size: int,
        seed: int,
        bins: dict[str, list],
        fine_bins: dict[str, list],
        strata: list[str],
        allowed_shortfall: float,
        on_shortfall: str,
        sweeps: int,
        tolerance: float,
        detector: LanguageDetector,
    ):
        # A histogram says nothing about bins finer than its own.
        self.grid = Grid(features(bins, fine_bins if sample else {}), strata)
        self.histogram = read_histogram(histogram, self.grid) if histogram else None
        self.sample = sample
        self.size = size
        self.seed = seed
        self.allowed_shortfall = allowed_shortfall
        self.fails = on_shortfall == "fail"
        self.sweeps = sweeps
        self.tolerance = tolerance
        self.detector = detector

    def measure(self, prompt: Prompt) -> tuple:
        """Return a row of MEASURED."""
        return measure(prompt, self.detector)

    def choose(self, columns: np.ndarray, *, sample: np.ndarray | None) -> tuple[np.ndarray, dict]:
        """Return the mask of the rows to keep, [N] bool, and the report, plain values for JSON.

        columns: [N] MEASURED of the pool; sample: [M] MEASURED of the production prompts, None with a histogram. The
        same rows in the same order give the same mask. Raises InputError when nothing can be drawn, or when more
        than prompts.traffic.allowed_shortfall is missing and prompts.traffic.on_shortfall is `fail`.
        """
        tables = self._tables(sample)
        cell_of_row = self.grid.cell_of_row(columns)
        counts = np.bincount(cell_of_row, minlength=self.grid.size)
        cells = np.flatnonzero(counts)
        random = np.random.default_rng(self.seed)
        expected = self._rake(counts[cells], cells, tables, bounded=True)
        # Rounded up, an expectation may come out above what a cell holds.
        drawn = np.minimum(whole_counts(expected, random), counts[cells])
        if not drawn.any():
            raise InputError(
                f"prompts.traffic: none of {len(columns)} prompts is in a bin that the target asks for; look at "
                f"prompts.traffic.bins and at the target itself"
            )
        report = self._report(tables, cells, counts[cells], drawn)
        report["sample"] = None if sample is None else len(sample)
        missing = missing_share(expected, margins_of(tables, self.grid, cells), size=self.size)
        report["shortfall"] = round(missing, 6)
        if missing > self.allowed_shortfall:
            if self.fails:
                raise InputError(f"{shortfall_line(report)}, or set prompts.traffic.on_shortfall=warn")
            log.warning("%s", shortfall_line(report))
        counts[cells] = drawn
        return _mask(cell_of_row, counts, random), report

    def _tables(self, sample: np.ndarray | None) -> list[Table]:
        if self.histogram is not None:
            return self.histogram
        if sample is None or not len(sample):
            raise InputError(f"prompts.traffic.sample={self.sample} holds no prompt that can be read; give some rows")
        return sample_tables(sample, self.grid)

    def _rake(self, pool: np.ndarray, cells: np.ndarray, tables: list[Table], *, bounded: bool) -> np.ndarray:
        return rake(
            pool,
            margins_of(tables, self.grid, cells),
            size=self.size,
            bounded=bounded,
            sweeps=self.sweeps,
            tolerance=self.tolerance,
        )

    def _report(self, tables: list[Table], cells: np.ndarray, before: np.ndarray, after: np.ndarray) -> dict:
        margins = margins_of(tables, self.grid, cells)
        return {
            "size": self.size,
            "seed": self.seed,
            "pool": int(before.sum()),
            "kept": int(after.sum()),
            "features": feature_mixes(self.grid, tables, cells, before, after),
            "tables": table_distances(tables, margins, before, after),
            "effective_sample_size": {
                "before": self._effective_sample_size(before, cells, tables),
                "after": self._effective_sample_size(after[after > 0], cells[after > 0], tables),
            },
            "unfilled": unfilled(self.grid, tables, margins, before, after, self.size),
        }

    def _effective_sample_size(self, counts: np.ndarray, cells: np.ndarray, tables: list[Table]) -> float:
        """Weight the rows to the target; what bins without rows would ask for is left out."""
        return round(effective_sample_size(counts, self._rake(counts, cells, tables, bounded=False)), 1)


def _mask(cell_of_row: np.ndarray, wanted: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw `wanted` rows of each cell: a random order inside each, of which the first are kept."""
    keys = cell_of_row.astype(np.uint64) << np.uint64(32)
    keys |= random.integers(1 << 32, size=len(keys), dtype=np.uint32)
    order = np.argsort(keys, kind="stable")
    ends = np.cumsum(np.bincount(cell_of_row, minlength=len(wanted)))
    mask = np.zeros(len(cell_of_row), dtype=bool)
    for cell in np.flatnonzero(wanted):
        start = ends[cell - 1] if cell else 0
        mask[order[start : start + wanted[cell]]] = True
    return mask
