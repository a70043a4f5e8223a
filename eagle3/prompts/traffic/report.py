"""Report of a draw: shares before and after, distances, unfilled quotas.

Shapes: C cells of the grid with rows of the pool. before: the pool's counts in them, after: the draw's.
"""

import numpy as np

from eagle3.prompts.traffic.grid import Grid
from eagle3.prompts.traffic.raking import Margin, total_variation
from eagle3.prompts.traffic.target import Table, shares


def feature_mixes(grid: Grid, tables: list[Table], cells: np.ndarray, before: np.ndarray, after: np.ndarray) -> dict:
    """Return for each feature: bins, target shares (None if the target does not have it), before, after, distances."""
    mixes = {}
    for name, feature in grid.features.items():
        table = next((table for table in tables if name in table.features), None)
        target = None if table is None else table.share_of(name, grid)
        mix_before, mix_after = (shares(grid, cells, counts, [name]) for counts in (before, after))
        mixes[name] = {
            "bins": list(feature.bins),
            "target": None if target is None else np.round(target, 6).tolist(),
            "before": np.round(mix_before, 6).tolist(),
            "after": np.round(mix_after, 6).tolist(),
            "distance_before": None if target is None else round(total_variation(mix_before, target), 6),
            "distance_after": None if target is None else round(total_variation(mix_after, target), 6),
        }
    return mixes


def table_distances(tables: list[Table], margins: list[Margin], before: np.ndarray, after: np.ndarray) -> list[dict]:
    """Return the total variation for every table of the target, e.g. the joint strata."""
    return [
        {
            "features": table.features,
            "before": round(total_variation(margin.sums(before) / before.sum(), table.shares), 6),
            "after": round(total_variation(margin.sums(after) / after.sum(), table.shares), 6),
        }
        for table, margin in zip(tables, margins, strict=True)
    ]


def unfilled(
    grid: Grid, tables: list[Table], margins: list[Margin], before: np.ndarray, after: np.ndarray, size: int
) -> list[dict]:
    """Return the quotas that the pool cannot fill, the largest gap first."""
    found = []
    for table, margin in zip(tables, margins, strict=True):
        wanted, held, kept = table.shares * size, margin.sums(before), margin.sums(after)
        found += [
            {
                "stratum": grid.labels(table.features, int(bin)),
                "wanted": round(float(wanted[bin]), 1),
                "in_pool": int(held[bin]),
                "kept": int(kept[bin]),
            }
            for bin in np.flatnonzero(held < wanted - 0.5)
            if table.binding
        ]
    return sorted(found, key=lambda quota: quota["in_pool"] - quota["wanted"])


def shortfall_line(report: dict) -> str:
    """Return a line that says how much is missing, and from which quotas most."""
    worst = "; ".join(
        f"{', '.join(f'{name} {label}' for name, label in quota['stratum'].items())}: "
        f"{quota['in_pool']} of {quota['wanted']:g}"
        for quota in report["unfilled"][:3]
    )
    # Tables that can be met one by one may still exclude each other.
    why = f"{len(report['unfilled'])} quotas stay short ({worst})" if worst else "not all tables can be met together"
    return (
        f"prompts.traffic.size={report['size']}: {report['kept']} prompts are drawn, {report['shortfall']:.1%} of the "
        f"mix is missing: {why}; add sources or lower prompts.traffic.size"
    )
