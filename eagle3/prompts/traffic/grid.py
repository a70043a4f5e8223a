"""Bins of the features, and the table over all of them. N rows, C cells."""

from dataclasses import dataclass

import numpy as np

from eagle3.errors import InputError
from eagle3.prompts.language import UNKNOWN
from eagle3.prompts.traffic.features import FLAGS, NUMERIC

FLAG_BINS = ("without", "with")
OTHER = "other"
BLOCK = 1 << 20  # rows whose bins are in memory at once
MAX_CELLS = 20_000_000  # 8 bytes each


@dataclass(frozen=True)
class Feature:
    """One column of MEASURED in bins: lower edges of numbers, or names."""

    name: str  # in reports: the column's, or that with "fine"
    column: str
    bins: tuple[str, ...]  # labels
    edges: tuple[float, ...] | None

    def codes(self, columns: np.ndarray) -> np.ndarray:
        """Return the bin of each row, [N] int64. A number below the first edge is in the first bin."""
        values = columns[self.column]
        if self.edges is not None:
            return np.maximum(np.searchsorted(self.edges, values, side="right") - 1, 0)
        if self.column in FLAGS:
            return values.astype(np.int64)
        codes = np.full(len(values), self.bins.index(OTHER))
        for code, name in enumerate(self.bins):
            codes[values == name.encode()] = code
        return codes

    def code(self, key: object) -> int | None:
        """Return the bin that a histogram means: by its lower edge, or by its name."""
        names = tuple(map(str, self.edges)) if self.edges is not None else self.bins
        if self.edges is not None and isinstance(key, (int, float, str)):
            try:
                key = float(key)
            except ValueError:
                return None
        return names.index(str(key)) if str(key) in names else None

    def keys(self) -> str:
        return ", ".join(self.bins if self.edges is None else (f"{edge:g}" for edge in self.edges))


class Grid:
    """The table over all features, cells numbered strata first: neighbours in number share a stratum."""

    def __init__(self, features: list[Feature], strata: list[str]):
        names = [feature.name for feature in features]
        self.strata = list(strata)
        inside = [feature for feature in features if feature.name not in strata]
        self.features = {feature.name: feature for feature in [*(features[names.index(n)] for n in strata), *inside]}
        self.shape = self.shape_of(list(self.features))
        self.size = int(np.prod(self.shape, dtype=float))
        if self.size > MAX_CELLS:
            raise InputError(
                f"prompts.traffic.bins and prompts.traffic.fine_bins make {self.size} cells, above {MAX_CELLS}; "
                f"take fewer bins"
            )

    def shape_of(self, names: list[str]) -> tuple[int, ...]:
        return tuple(len(self.features[name].bins) for name in names)

    def cell_of_row(self, columns: np.ndarray) -> np.ndarray:
        """Return the cell of each row, [N] int32."""
        cells = np.empty(len(columns), dtype=np.int32)
        for start in range(0, len(columns), BLOCK):
            block = columns[start : start + BLOCK]
            codes = tuple(feature.codes(block) for feature in self.features.values())
            cells[start : start + BLOCK] = np.ravel_multi_index(codes, self.shape)
        return cells

    def bin_of_cell(self, cells: np.ndarray, names: list[str]) -> np.ndarray:
        """Find where each cell falls in the smaller table over `names`, [C]."""
        codes = dict(zip(self.features, np.unravel_index(cells, self.shape), strict=True))
        return np.ravel_multi_index(tuple(codes[name] for name in names), self.shape_of(names))

    def labels(self, names: list[str], bin: int) -> dict[str, str]:
        """Return the bin of the table over `names` in words."""
        codes = np.unravel_index(bin, self.shape_of(names))
        return {name: self.features[name].bins[code] for name, code in zip(names, codes, strict=True)}


def features(bins: dict[str, list], fine_bins: dict[str, list]) -> list[Feature]:
    """Return the features of prompts.traffic.bins, tools and system_prompt, then those of prompts.traffic.fine_bins."""
    found = [_numeric("bins", name, bins[name]) for name in NUMERIC if name in bins]
    if "language" in bins:
        found.append(Feature("language", "language", (*map(str, bins["language"]), OTHER, UNKNOWN), None))
    found += [Feature(name, name, FLAG_BINS, None) for name in FLAGS]
    return found + [_numeric("fine_bins", name, edges) for name, edges in fine_bins.items()]


def _numeric(key: str, column: str, edges: list[float]) -> Feature:
    labels = [_label(low, high, column) for low, high in zip(edges, [*edges[1:], None], strict=True)]
    name = column if key == "bins" else f"{column}, fine"
    return Feature(name, column, tuple(labels), tuple(map(float, edges)))


def _label(low: float, high: float | None, column: str) -> str:
    if high is None:
        return f"{low:g} and more"
    if column == "code_share":
        return f"{low:g} to below {high:g}"
    return f"{low:g}" if high - low == 1 else f"{low:g} to {high - 1:g}"
