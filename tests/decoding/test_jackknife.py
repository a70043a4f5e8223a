"""The jackknife: for a mean it is the textbook formula, and where nothing varies it is zero."""

import math
import statistics

import numpy as np
import pytest
from leave_one_out import leave_one_out_error

from eagle3.decoding.jackknife import left_out_ratios, standard_error

VALUES = [1.0, 4.0, 2.0, 8.0, 5.0]


def test_for_a_mean_it_is_the_standard_deviation_over_the_root_of_the_count() -> None:
    expected = statistics.stdev(VALUES) / math.sqrt(len(VALUES))
    assert leave_one_out_error(statistics.fmean, VALUES) == pytest.approx(expected)


def test_equal_items_have_no_error_and_one_item_says_nothing() -> None:
    assert leave_one_out_error(statistics.fmean, [3.0, 3.0, 3.0]) == 0
    assert standard_error(np.array([3.0])) == math.inf
    assert standard_error(np.array([])) == math.inf


def test_ratios_are_those_of_the_sums_without_each_item() -> None:
    assert left_out_ratios(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 4.0])).tolist() == [5 / 8, 4 / 6, 3 / 6]
