"""The target mix as tables of shares: counted in a sample of production prompts, or read from a histogram.

A histogram is a YAML or JSON file. Bins are named by their lower edge in prompts.traffic.bins, or by their name; shares
may be counts:

    marginals:
      turns: {1: 0.7, 2: 0.2, 3: 0.1}
      language: {en: 0.9, other: 0.1}
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from eagle3.errors import InputError
from eagle3.prompts.traffic.grid import Grid


class Table(NamedTuple):
    """Wanted shares of the joint bins of some features."""

    features: list[str]
    shares: np.ndarray  # [bins], flat in the order of `features`; sum to 1
    binding: bool  # a quota: rows that the pool lacks here make the draw smaller


def sample_tables(cells: np.ndarray, counts: np.ndarray, grid: Grid) -> list[Table]:
    """Return a table of every feature outside the strata, and the joint table of the strata, binding.

    counts: prompts of the sample in each of `cells`, [C] both.
    """
    groups = [[name] for name in grid.features if name not in grid.strata]
    return [
        Table(names, shares(grid, cells, counts, names), binding=names == grid.strata)
        for names in [*groups, grid.strata]
    ]


def shares(grid: Grid, cells: np.ndarray, counts: np.ndarray, names: list[str]) -> np.ndarray:
    """Return the shares of `counts` in `cells` over the bins of `names`."""
    bins = int(np.prod(grid.shape_of(names)))
    return np.bincount(grid.bin_of_cell(cells, names), weights=counts, minlength=bins) / counts.sum()


def read_histogram(path: str, grid: Grid) -> list[Table]:
    """Return the tables of a histogram file, all binding."""
    key = f"prompts.traffic.histogram={path}"
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{key} cannot be read as YAML or JSON ({type(error).__name__}); name such a file") from None
    if not isinstance(content, dict) or set(content) != {"marginals"}:
        raise InputError(f"{key} must have `marginals` and nothing else at the top")
    marginals = content["marginals"]
    if not (isinstance(marginals, dict) and marginals and all(isinstance(bins, dict) for bins in marginals.values())):
        raise InputError(f"{key}: marginals must be written as feature: {{bin: share}}")
    return [_table(f"{key}: marginals.{name}", name, bins, grid) for name, bins in marginals.items()]


def _table(key: str, name: str, bins: dict[object, Any], grid: Grid) -> Table:
    if name not in grid.features:
        raise InputError(f"{key}: {name} is not a feature; take {', '.join(grid.features)}")
    counts = np.zeros(len(grid.features[name].bins))
    for bin, share in bins.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < np.inf:
            raise InputError(f"{key}: {bin} has the share {share}; give a number of 0 or more")
        counts[_code(key, grid, name, bin)] += share
    if not counts.sum():
        raise InputError(f"{key}: the shares sum to 0; give one bin a share above 0")
    return Table([name], counts / counts.sum(), binding=True)


def _code(key: str, grid: Grid, name: str, bin: object) -> int:
    feature = grid.features[name]
    code = feature.code_of(bin)
    if code is None:
        raise InputError(
            f"{key}: {bin} is not a bin of {name}; take {feature.keys()} (quote 'no' and 'on'), or set "
            f"prompts.traffic.bins.{name} to your own"
        )
    return code
