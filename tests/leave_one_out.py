"""A plain reference for the jackknife: the value of any statistic with each item left out in turn."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from eagle3.decoding.jackknife import standard_error

Item = TypeVar("Item")


def leave_one_out_error(statistic: Callable[[Sequence[Item]], float], items: Sequence[Item]) -> float:
    """Return the standard error of `statistic(items)`."""
    values = [statistic([*items[:place], *items[place + 1 :]]) for place in range(len(items))]
    return standard_error(np.array(values, float))
