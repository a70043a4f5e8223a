"""The benchmark's arithmetic against slow plain references."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from eagle3.engine.timed import ServedAnswer
from eagle3.serving.bench.loads import MeasuredLoad
from eagle3.serving.bench.stats import (
    Interval,
    SpeedUp,
    acceptance_per_depth,
    by_set,
    compare,
    gather_cells,
    mean_ratio,
    percentiles,
    stops_paying,
    summarise,
)
from eagle3.serving.server.load import Agreement, LoadResult
from eagle3.settings.serving import Side

T_975 = {1: 12.7062, 2: 4.30265, 4: 2.77645}  # Student's t, by degrees of freedom: any printed table


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
    return LoadResult(list(answers), seconds, cache_flushed=True)


@pytest.mark.parametrize("count", [1, 2, 3, 50, 101])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    draws = random.Random(count)
    values = [draws.expovariate(1) for _ in range(count)]
    found = percentiles([*values, None])
    assert found is not None
    assert (found.median, found.p90, found.p99) == pytest.approx(tuple(np.percentile(values, [50, 90, 99])))


def test_time_per_token_leaves_the_first_token_out() -> None:
    assert ServedAnswer(ttft_s=1.0, latency_s=3.0, output_tokens=5).tpot_s == 0.5
    assert ServedAnswer(ttft_s=1.0, latency_s=1.0, output_tokens=1).tpot_s is None
    assert ServedAnswer(error="x").tpot_s is None


def test_acceptance_per_depth_is_the_share_of_rounds_that_went_so_deep() -> None:
    rounds = [0, 1, 1, 3, 0, 2]  # drafts accepted by each verification
    histograms = [[1, 2, 0, 1], [1, 0, 1], []]  # the same, by answer
    expected = [sum(accepted >= depth for accepted in rounds) / len(rounds) for depth in (1, 2, 3)]
    assert acceptance_per_depth(histograms) == pytest.approx(expected)
    assert acceptance_per_depth([]) == [] == acceptance_per_depth([[]])


def test_accept_length_weighs_verifications_not_answers() -> None:
    found = summarise([load(answer(0.1, histogram=(8, 0))), load(answer(0.1, histogram=(0, 2)), answer(0.1))])
    assert found.accept_length == pytest.approx(1 + 2 / 10)
    assert found.accept_length == pytest.approx(1 + sum(found.per_depth))


def test_throughput_is_tokens_over_time_of_all_repeats() -> None:
    found = summarise([load(answer(0.1, 10), answer(0.1, 20), seconds=2), load(answer(0.1, 30), seconds=4)])
    assert found.throughput == pytest.approx(60 / 6)


def test_failed_requests_are_counted_by_reason_and_nowhere_else() -> None:
    found = summarise(
        [
            load(answer(0.1), ServedAnswer(error="no room")),
            load(ServedAnswer(error="no room"), ServedAnswer(error="cut")),
        ]
    )
    assert (found.requests, found.failed) == (4, 3)
    assert found.errors == {"no room": 2, "cut": 1}
    assert found.tpot is not None and found.tpot.median == pytest.approx(0.1)
    assert found.throughput == pytest.approx(11 / 4)


def test_a_load_of_failures_alone_has_no_times() -> None:
    found = summarise([load(ServedAnswer(error="cut"))])
    assert (found.tpot, found.ttft, found.accept_length, found.throughput) == (None, None, None, 0.0)
    assert percentiles([]) is None and percentiles([None]) is None
    pair = compare([load(ServedAnswer(error="cut"))], [load(answer(0.1))])
    assert pair == SpeedUp(None, None)


@pytest.mark.parametrize("ratios", [[2.0, 1.5], [1.2, 1.3, 1.1], [0.9, 1.0, 1.1, 1.05, 0.95]])
def test_the_interval_is_students_t_on_logarithms(ratios: list[float]) -> None:
    found = mean_ratio(ratios)
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    variance = sum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    margin = T_975[len(ratios) - 1] * math.sqrt(variance / len(logs))
    expected = [math.exp(mean + sign * margin) for sign in (0, -1, 1)]
    assert found is not None
    assert [found.value, found.low, found.high] == pytest.approx(expected, rel=1e-4)


def test_one_repeat_has_no_interval_and_none_has_no_ratio() -> None:
    assert mean_ratio([1.5]) == Interval(pytest.approx(1.5), None, None)
    assert mean_ratio([]) is None


def test_repeats_are_paired_in_order_and_one_of_a_single_side_has_no_pair() -> None:
    plain = [load(answer(0.2), seconds=4), load(answer(0.4), seconds=8)]
    head = [load(answer(0.1), seconds=2), load(answer(0.2), seconds=4)]
    found = compare(plain, head)
    assert found.tpot is not None and found.throughput is not None
    for ratio in (found.tpot, found.throughput):
        assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert compare(plain, head[:1]).tpot == Interval(pytest.approx(2.0), None, None)


def test_the_share_of_same_answers_is_over_all_that_were_compared() -> None:
    repeats = [replace(load(answer(0.1)), agreement=Agreement(same, 4)) for same in (1, 4)]
    assert summarise(repeats).same_answers == 5 / 8
    assert summarise([load(answer(0.1))]).same_answers is None


def gain(value: float, low: float | None = None) -> Interval:
    return Interval(value, low, None if low is None else value**2 / low)


@pytest.mark.parametrize(
    ("speed_ups", "end"),
    [
        ({1: gain(2.0, 1.8), 8: gain(1.2, 1.1)}, None),
        ({1: gain(2.0, 1.8), 8: gain(1.2, 0.9), 16: gain(0.8, 0.7)}, 8),  # the interval holds 1
        ({1: gain(2.0, 1.8), 8: gain(1.2, 1.0)}, 8),
        ({1: gain(1.1), 8: gain(0.9)}, 8),  # one repeat
        ({}, None),
    ],
)
def test_speculation_stops_paying_where_the_interval_is_not_wholly_above_one(
    speed_ups: dict[int, Interval], end: int | None
) -> None:
    assert stops_paying(speed_ups) == end


def measured(side: Side, prompt_set: str, concurrency: int, repeat: int, tpot_s: float) -> MeasuredLoad:
    return MeasuredLoad(side, prompt_set, concurrency, repeat, load(answer(tpot_s)))


def test_measurements_are_gathered_by_prompt_set_and_concurrency() -> None:
    found = gather_cells(
        [
            measured("plain", "chat", 8, 0, 0.2),
            measured("plain", "chat", 1, 0, 0.2),
            measured("head", "chat", 8, 0, 0.1),
            measured("plain", "code", 1, 0, 0.3),
        ]
    )
    sets = by_set(found)
    assert {name: [cell.concurrency for cell in of_set] for name, of_set in sets.items()} == {
        "chat": [1, 8],
        "code": [1],
    }
    assert sets["chat"][0].speed_ups == {}
    times = sets["chat"][1].speed_ups["head"].tpot
    assert times is not None and times.value == pytest.approx(2.0)
