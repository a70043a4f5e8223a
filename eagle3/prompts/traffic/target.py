"""The target mix as tables of shares: counted in a sample of production prompts, or read from a histogram.

A histogram is a YAML or JSON file. Bins are named by their lower edge in prompts.traffic.bins, or by their name; shares
may be counts:

    marginals:
      turns: {1: 0.7, 2: 0.2, 3: 0.1}
      language: {en: 0.9, other: 0.1}
"""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eagle3.errors import InputError
from eagle3.prompts.traffic.grid import Grid


def shares(grid: Grid, cells: np.ndarray, counts: np.ndarray, names: list[str]) -> np.ndarray:
    """Return the shares of `counts` in `cells` over the bins of `names`."""
    bins = int(np.prod(grid.shape_of(names)))
    return np.bincount(grid.bin_of_cell(cells, names), weights=counts, minlength=bins) / counts.sum()


def read_histogram(path: str, grid: Grid) -> dict[str, np.ndarray]:
    """Return the shares of each feature's bins in a histogram file; they sum to 1."""
    key = f"prompts.traffic.histogram={path}"
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{key} cannot be read as YAML or JSON ({type(error).__name__}); name such a file") from None
    marginals = content.get("marginals") if isinstance(content, dict) and len(content) == 1 else None
    if not (isinstance(marginals, dict) and marginals and all(isinstance(bins, dict) for bins in marginals.values())):
        raise InputError(f"{key} must have `marginals` and nothing else at the top, written as feature: {{bin: share}}")
    return {name: _marginal(f"{key}: marginals.{name}", name, bins, grid) for name, bins in marginals.items()}


def _marginal(key: str, name: str, bins: dict[object, Any], grid: Grid) -> np.ndarray:
    if name not in grid.features:
        raise InputError(f"{key}: {name} is not a feature; take {', '.join(grid.features)}")
    feature = grid.features[name]
    counts = np.zeros(len(feature.bins))
    for bin, share in bins.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < np.inf:
            raise InputError(f"{key}: {bin} has the share {share}; give a number of 0 or more")
        code = feature.code_of(bin)
        if code is None:
            raise InputError(
                f"{key}: {bin} is not a bin of {name}; take {feature.keys()} (quote 'no' and 'on'), or set "
                f"prompts.traffic.bins.{name} to your own"
            )
        counts[code] += share
    if not counts.sum():
        raise InputError(f"{key}: the shares sum to 0; give one bin a share above 0")
    return counts / counts.sum()
