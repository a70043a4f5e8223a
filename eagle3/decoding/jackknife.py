"""How sure a number is that was measured on few prompts.

Rounds and tokens of one answer are alike, so the prompt is what is drawn at random. Source: B. Efron and C. Stein, The
jackknife estimate of variance, Annals of Statistics 9 (1981).
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def standard_error(statistic: Callable[[Sequence[Item]], float], items: Sequence[Item]) -> float:
    """Of `statistic(items)`, from its values with each item left out in turn; infinite for fewer than two items."""
    count = len(items)
    if count < 2:
        return math.inf
    values = [statistic([*items[:place], *items[place + 1 :]]) for place in range(count)]
    mean = sum(values) / count
    return math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in values))
