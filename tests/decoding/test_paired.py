"""Paired differences of accept lengths: the jackknife's number, and an interval that holds the truth as it says."""

import math
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest

from eagle3.decoding.paired import CONFIDENCE, Gains, accept_length, difference, left_out_ratios, standard_error

PROMPTS = 60


def leave_one_out_error(statistic: Callable[[list[Any]], float], items: list[Any]) -> float:
    """A plain reference: the value of any statistic with each item left out in turn."""
    return standard_error(np.array([statistic([*items[:place], *items[place + 1 :]]) for place in range(len(items))]))


def test_the_error_of_a_mean_is_the_standard_deviation_over_the_root_of_the_count():
    values = [1.0, 4.0, 2.0, 8.0, 5.0]
    expected = pytest.approx(stdev(values) / math.sqrt(len(values)))
    assert leave_one_out_error(fmean, values) == expected
    assert standard_error(left_out_ratios(np.array(values), np.ones(5))) == expected


def drawn(rng: np.random.Generator, prompts: int = PROMPTS) -> tuple[Gains, Gains]:
    """Two heads on answers of ragged lengths, some of one token: prompts are easy or hard for both of them."""
    tokens = rng.choice([0, 7, 31, 95], prompts, p=[0.1, 0.2, 0.3, 0.4])
    easy = rng.uniform(0.2, 0.8, prompts)
    found = []
    for better in (0.0, 0.05):
        accepted = rng.binomial(tokens, np.clip(easy + better, 0, 1) / 2)
        found.append(Gains(accepted.astype(float), (tokens - accepted).astype(float), np.arange(prompts)))
    return found[0], found[1]


def test_a_difference_has_the_standard_error_that_leaving_out_each_prompt_in_turn_gives():
    first, ours = drawn(np.random.default_rng(0))
    pairs = [pair for pair in zip(*ours[:2], *first[:2], strict=True) if pair[1]]  # prompts that took a verification

    def gained(some: list[tuple[float, ...]]) -> float:
        accepted, rounds, accepted_first, rounds_first = (sum(column) for column in zip(*some, strict=True))
        return accepted / rounds - accepted_first / rounds_first

    found = difference(ours, first)
    assert found.value == pytest.approx(gained(pairs)) and 0 < len(pairs) < PROMPTS
    assert found.standard_error == pytest.approx(leave_one_out_error(gained, pairs))
    alone = accept_length(first)
    assert alone.standard_error == pytest.approx(
        leave_one_out_error(lambda some: 1 + sum(pair[2] for pair in some) / sum(pair[3] for pair in some), pairs)
    )


@pytest.mark.parametrize("prompts", [30, 200])
def test_the_interval_holds_the_true_difference_as_often_as_it_says(prompts):
    rng = np.random.default_rng(2)
    many_first, many_ours = drawn(rng, 400_000)
    true = many_ours.accept_length - many_first.accept_length
    repeats = 2000
    held = 0
    for _ in range(repeats):
        first, ours = drawn(rng, prompts)
        found = difference(ours, first)
        held += found.low <= true <= found.high
    assert held / repeats == pytest.approx(CONFIDENCE, abs=0.025)


def test_a_head_differs_from_itself_by_nothing_and_one_prompt_has_no_error():
    first, _ = drawn(np.random.default_rng(3))
    assert difference(first, first) == (0, 0, 0, 0)
    one = Gains(np.array([3.0, 0.0]), np.array([2.0, 0.0]), np.arange(2))  # the second answer was one token long
    assert accept_length(one) == (2.5, None, None, None)
    assert difference(one, one) == (0, None, None, None)
