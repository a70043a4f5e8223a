"""Chooses how many prompts of each cell match production traffic: quotas by stratum, raking inside.

Strata are the joint bins of a few features; each has a quota. Inside a stratum prompts are drawn, without replacement,
so that the other features are as close to the target as the pool allows. If the pool lacks prompts for a stratum, the
draw gets smaller instead of taking more from other strata, and so stays closer to the target.

Raking, or iterative proportional fitting (Deming and Stephan 1940), scales the cells of every bin to the bin's goal,
margin after margin, until all fit. The result is the mix with those margins that is closest to the pool, in relative
entropy. Shapes: C cells of the grid with prompts, B bins of a margin.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

from eagle3.errors import InputError
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.traffic.grid import Grid, features, measure
from eagle3.settings.prompts import TrafficSettings

log = logging.getLogger(__name__)

TOLERANCE = 1e-4  # share of the draw that every margin may miss


class Margin(NamedTuple):
    """Wanted shares of the bins of one table, and which bin each cell is in."""

    features: list[str]
    bin_of_cell: Int[np.ndarray, " C"]
    shares: Float[np.ndarray, " B"]  # sum to 1

    def sums(self, cells: np.ndarray) -> Num[np.ndarray, " B"]:
        return np.bincount(self.bin_of_cell, weights=cells, minlength=len(self.shares))


def rake(
    pool: Int[np.ndarray, " C"], margins: list[Margin], *, size: float, sweeps: int = 200, tolerance: float = TOLERANCE
) -> Float[np.ndarray, " C"]:
    """Return the expected counts of a draw of `size` rows without replacement; every cell of `pool` has one or more.

    The last margin is binding, the others are best effort: a bin of it that the pool cannot fill makes the draw
    smaller, because taking more from others would move the mix away from the target. Stops after `sweeps`, or when all
    margins miss their goals by less than `tolerance` of the draw.
    """
    reach = [np.minimum(margin.shares * size, margin.sums(pool)) for margin in margins]
    total = reach[-1].sum()
    goals = [goal * (total / goal.sum()) if goal.sum() else goal for goal in reach]
    cells = pool.astype(float)
    for _ in range(sweeps):
        for margin, goal in zip(margins, goals, strict=True):
            sums = margin.sums(cells)
            factors = np.divide(goal, sums, out=np.zeros_like(goal), where=sums > 0)
            cells = np.minimum(cells * factors[margin.bin_of_cell], pool)
        misses = [np.abs(margin.sums(cells) - goal).sum() for margin, goal in zip(margins, goals, strict=True)]
        if max(misses) <= tolerance * total:
            break
    return cells


def whole_counts(expected: Float[np.ndarray, " C"], random: np.random.Generator) -> Int[np.ndarray, " C"]:
    """Round by systematic sampling (Madow 1949): each count is its expectation rounded up or down, and so is the sum of
    any run of neighbours, so that adjacent cells keep their total."""
    ends = np.cumsum(expected)
    if len(ends):
        ends[-1] = round(ends[-1])
    return np.diff(np.floor(ends + random.random()), prepend=0.0).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class TrafficMix(TrafficSettings):
    """The mix of conf/prompts/traffic. The scan calls `cell` for every prompt, the selection `choose` once.

    sample: path of production prompts, in any shape and format of a source; the caller reads them.
    """

    @cached_property
    def grid(self) -> Grid:
        return Grid(features(self.bins), self.strata)

    def cell(self, prompt: Prompt) -> int:
        return self.grid.cell(measure(prompt))

    def choose(self, pool: Mapping[int, int], *, sample: Counter[int]) -> tuple[dict[int, int], dict]:
        """Return how many prompts to draw from each cell, and the report as plain values for JSON.

        pool, sample: prompts and production prompts by cell. Raises InputError if nothing can be drawn; warns if the
        pool cannot fill the mix.
        """
        if not sample:
            raise InputError(f"prompts.traffic.sample={self.sample} has no prompt that can be read; add some rows")
        cells, counts = _arrays(pool)
        margins = self._margins(cells, sample)
        expected = rake(counts, margins, size=self.size)
        # Rounding up may exceed the prompts of a cell.
        drawn = np.minimum(whole_counts(expected, np.random.default_rng(self.seed)), counts)
        if not drawn.any():
            raise InputError(
                f"prompts.traffic: none of {counts.sum()} prompts is in a bin of the sample; check "
                f"prompts.traffic.bins and prompts.traffic.sample"
            )
        strata = margins[-1]
        missing = float(np.maximum(strata.shares - strata.sums(expected) / self.size, 0).sum())
        report = {
            "size": self.size,
            "seed": self.seed,
            "pool": int(counts.sum()),
            "kept": int(drawn.sum()),
            "features": _feature_mixes(self.grid, sample, cells, counts, drawn),
            "unfilled": _unfilled(self.grid, strata, counts, drawn, self.size),
            "sample": sample.total(),
            "shortfall": round(missing, 6),
        }
        if missing > TOLERANCE:
            log.warning("%s", _shortfall_line(report))
        return dict(zip(cells.tolist(), drawn.tolist(), strict=True)), report

    def _margins(self, cells: np.ndarray, sample: Counter[int]) -> list[Margin]:
        """Return the sample's mix of each feature outside the strata, and at last of the joint bins of the strata."""
        tables = [[name] for name in self.grid.features if name not in self.strata] + [self.grid.strata]
        return [
            Margin(names, self.grid.bin_of_cell(cells, names), self.grid.shares(*_arrays(sample), names))
            for names in tables
        ]


def _arrays(counts: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return cells in ascending order and their counts, both [C]."""
    cells = np.array(sorted(counts), dtype=np.int64)
    return cells, np.array([counts[cell] for cell in cells.tolist()], dtype=np.int64)


def _feature_mixes(grid: Grid, sample: Counter[int], cells: np.ndarray, before: np.ndarray, after: np.ndarray) -> dict:
    """Return for each feature: bins, shares in the sample, before and after, distances.

    before: the pool's counts in the cells; after: the draw's.
    """
    mixes: dict[str, dict] = {}
    for name, feature in grid.features.items():
        target = grid.shares(*_arrays(sample), [name])
        mixes[name] = {"bins": list(feature.bins), "target": np.round(target, 6).tolist()}
        for when, counts in (("before", before), ("after", after)):
            found = grid.shares(cells, counts, [name])
            distance = float(np.abs(found - target).sum() / 2)  # total variation: the share that would have to move
            mixes[name] |= {when: np.round(found, 6).tolist(), f"distance_{when}": round(distance, 6)}
    return mixes


def _unfilled(grid: Grid, strata: Margin, before: np.ndarray, after: np.ndarray, size: int) -> list[dict]:
    """Return the quotas that the pool cannot fill, the largest gap first."""
    wanted, held, kept = strata.shares * size, strata.sums(before), strata.sums(after)
    found = [
        {
            "stratum": grid.labels(strata.features, int(bin)),
            "wanted": round(float(wanted[bin]), 1),
            "in_pool": int(held[bin]),
            "kept": int(kept[bin]),
        }
        for bin in np.flatnonzero(held < wanted - 0.5)
    ]
    return sorted(found, key=lambda quota: quota["in_pool"] - quota["wanted"])


def _shortfall_line(report: dict) -> str:
    """Return a line that says how much is missing, and from which quotas most."""
    worst = "; ".join(
        f"{', '.join(f'{name} {label}' for name, label in quota['stratum'].items())}: "
        f"{quota['in_pool']} of {quota['wanted']:g}"
        for quota in report["unfilled"][:3]
    )
    return (
        f"prompts.traffic.size={report['size']}: {report['kept']} prompts are drawn, {report['shortfall']:.1%} of the "
        f"mix is missing: {len(report['unfilled'])} quotas stay short ({worst or 'by less than a prompt'}); add "
        f"sources or lower prompts.traffic.size"
    )
