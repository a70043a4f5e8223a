"""The benchmark's arithmetic against slow plain references."""

import math
from dataclasses import replace

import numpy as np
import pytest

from eagle3.engine.timed import ServedAnswer
from eagle3.serving.bench.loads import MeasuredLoad
from eagle3.serving.bench.stats import Interval, SpeedUp, compare, mean_ratio, stops_paying, summarise
from eagle3.serving.server.load import Agreement, LoadResult
from eagle3.settings.serving import Side

T_975 = {1: 12.7062, 2: 4.30265, 4: 2.77645}  # Student's t, by degrees of freedom: any printed table
CUT = ServedAnswer(error="cut")


def answer(tpot_s: float, tokens: int = 11, ttft_s: float = 0.5, histogram: tuple[int, ...] = ()) -> ServedAnswer:
    return ServedAnswer(
        ttft_s=ttft_s,
        latency_s=ttft_s + tpot_s * (tokens - 1),
        output_tokens=tokens,
        finish_reason="stop",
        verify_ct=sum(histogram),
        correct_drafts=sum(depth * count for depth, count in enumerate(histogram)),
        histogram=histogram,
    )


def load(*answers: ServedAnswer, seconds: float = 2.0) -> LoadResult:
    return LoadResult(
        list(answers), 2 * seconds, seconds, sum(each.output_tokens for each in answers), cache_flushed=True
    )


def measured(side: Side, *results: LoadResult, starts: int = 1) -> list[MeasuredLoad]:
    """Loads of one cell, as many of each start."""
    per_start = len(results) // starts
    return [MeasuredLoad(side, "chat", 4, *divmod(n, per_start), result) for n, result in enumerate(results)]


def test_repeats_are_added_up_and_failed_requests_count_nowhere_else():
    repeats = [
        load(answer(0.1, 10, 0.2, (8, 0)), ServedAnswer(error="no room"), seconds=2),
        load(answer(0.3, 20, 0.4, (0, 2)), answer(0.2, 30, 0.6), answer(0.7, 1, 0.6), CUT, CUT, seconds=4),
    ]
    found = summarise([replace(each, agreement=Agreement(same, 4)) for each, same in zip(repeats, (1, 4), strict=True)])
    assert (found.requests, found.failed, found.errors) == (7, 3, {"no room": 1, "cut": 2})
    assert found.throughput == pytest.approx(61 / 6)  # tokens over seconds of all repeats
    assert found.accept_length == pytest.approx(1 + 2 / 10)  # of verifications, not of answers
    assert found.accept_length == pytest.approx(1 + sum(found.per_depth))
    assert found.same_answers == 5 / 8 and summarise(repeats).same_answers is None
    for spread, values in ((found.tpot, [0.1, 0.2, 0.3]), (found.ttft, [0.2, 0.4, 0.6, 0.6])):  # one token: no TPOT
        assert spread is not None
        assert [spread.median, spread.p90, spread.p99] == pytest.approx(np.percentile(values, [50, 90, 99]))


def test_a_load_of_failures_alone_has_no_times():
    found = summarise([load(CUT)])
    assert (found.tpot, found.ttft, found.accept_length, found.throughput) == (None, None, None, 0.0)
    assert compare(measured("plain", load(CUT)), measured("head", load(answer(0.1)))) == SpeedUp(None, None)


@pytest.mark.parametrize("ratios", [[2.0, 1.5], [1.2, 1.3, 1.1], [0.9, 1.0, 1.1, 1.05, 0.95]])
def test_the_interval_is_students_t_on_logarithms(ratios):
    found = mean_ratio(ratios)
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    variance = sum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    margin = T_975[len(ratios) - 1] * math.sqrt(variance / len(logs))
    expected = [math.exp(mean + sign * margin) for sign in (0, -1, 1)]
    assert found is not None
    assert [found.value, found.low, found.high] == pytest.approx(expected, rel=1e-4)


def test_repeats_are_paired_in_order_and_one_of_a_single_side_has_no_pair():
    plain = measured("plain", load(answer(0.2), seconds=4), load(answer(0.4), seconds=8))
    head = measured("head", load(answer(0.1), seconds=2), load(answer(0.2), seconds=4))
    found = compare(plain, head)
    assert found.tpot is not None and found.throughput is not None
    for ratio in (found.tpot, found.throughput):
        assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert compare(plain, head[:1]).tpot == Interval(pytest.approx(2.0), None, None)  # one repeat has no interval


def test_servers_started_again_give_one_ratio_a_start_over_all_its_repeats():
    times = [0.2, 0.4, 0.6, 0.8]
    plain = measured("plain", *(load(answer(each), answer(each)) for each in times), starts=2)
    head = measured("head", *(load(answer(0.1), seconds=2 * (1 + n)) for n in range(4)), starts=2)
    found = compare(plain, head)
    for ratio, expected in (
        (found.tpot, [0.3 / 0.1, 0.7 / 0.1]),  # medians of both repeats
        (found.throughput, [(22 / 6) / (44 / 4), (22 / 14) / (44 / 4)]),  # tokens over seconds of both
    ):
        wanted = mean_ratio(expected)
        assert ratio is not None and wanted is not None
        assert (ratio.value, ratio.low, ratio.high) == pytest.approx((wanted.value, wanted.low, wanted.high))
    assert compare(plain, head[:2]).tpot == Interval(pytest.approx(3.0), None, None)


def gain(value: float, low: float | None = None) -> Interval:
    return Interval(value, low, None if low is None else value**2 / low)


@pytest.mark.parametrize(
    ("speed_ups", "end"),
    [
        ({1: gain(2.0, 1.8), 8: gain(1.2, 1.1)}, None),
        ({1: gain(2.0, 1.8), 8: gain(1.2, 0.9), 16: gain(0.8, 0.7)}, 8),  # the interval holds 1
        ({1: gain(2.0, 1.8), 8: gain(1.2, 1.0)}, 8),
        ({1: gain(1.1), 8: gain(0.9)}, 8),  # one repeat
    ],
)
def test_speculation_stops_paying_where_the_interval_is_not_wholly_above_one(speed_ups, end):
    assert stops_paying(speed_ups) == end
