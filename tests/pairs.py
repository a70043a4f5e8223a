"""Cases for parametrized tests in which each value of an option meets each value of every other, not all products."""

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest


def all_pairs(**options: Mapping[str, Any] | list[Any]) -> pytest.MarkDecorator:
    """Parametrize by `options`, each a list of values or a mapping from ids to values."""
    values = [list(each.values() if isinstance(each, Mapping) else each) for each in options.values()]
    ids = [list(each) if isinstance(each, Mapping) else [str(value) for value in each] for each in options.values()]
    places = [range(len(each)) for each in values]

    def pairs(case: tuple[int, ...]) -> set[Any]:
        return set(combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, product(*places)))
    cases = []
    while missing:
        best = max(product(*places), key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        name = "-".join(of[place] for of, place in zip(ids, best, strict=True))
        cases.append(pytest.param(*(of[place] for of, place in zip(values, best, strict=True)), id=name))
    return pytest.mark.parametrize(tuple(options), cases)
