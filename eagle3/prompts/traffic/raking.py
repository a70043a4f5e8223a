"""Chooses how many rows of each cell of a table give the wanted margins. Shapes: C cells, B bins of a margin.

Raking, or iterative proportional fitting (Deming and Stephan 1940), scales the cells of every bin to the bin's goal,
margin after margin, until all fit. The result is the mix with those margins that is closest to the pool, in relative
entropy.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

TOLERANCE = 1e-4  # share of the draw that every margin may miss


class Margin(NamedTuple):
    """Wanted shares of the bins of one table, and which bin each cell is in."""

    features: list[str]
    bin_of_cell: Int[np.ndarray, "C"]
    shares: Float[np.ndarray, "B"]  # sum to 1

    def sums(self, cells: np.ndarray) -> Num[np.ndarray, " B"]:
        return np.bincount(self.bin_of_cell, weights=cells, minlength=len(self.shares))


def rake(
    pool: Int[np.ndarray, "C"], margins: list[Margin], *, size: float, sweeps: int = 200, tolerance: float = TOLERANCE
) -> Float[np.ndarray, "C"]:
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


def whole_counts(expected: Float[np.ndarray, "C"], random: np.random.Generator) -> Int[np.ndarray, "C"]:
    """Round by systematic sampling (Madow 1949): each count is its expectation rounded up or down, and so is the sum of
    any run of neighbours, so that adjacent cells keep their total."""
    ends = np.cumsum(expected)
    if len(ends):
        ends[-1] = round(ends[-1])
    return np.diff(np.floor(ends + random.random()), prepend=0.0).astype(np.int64)
