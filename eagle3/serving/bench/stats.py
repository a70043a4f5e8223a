"""The arithmetic of a bench run: from answers to the numbers of the report.

A cell is one prompt set at one concurrency. Only complete answers are counted; failed ones are counted separately.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest

import numpy as np

from eagle3.decoding.paired import estimate_mean
from eagle3.serving.bench.loads import MeasuredLoad
from eagle3.serving.server.load import LoadResult
from eagle3.settings.serving import Side


@dataclass(frozen=True)
class Spread:
    """Median and upper percentiles, linear between neighbours."""

    median: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Interval:
    """A ratio with its confidence interval; `low` and `high` are None after a single repeat."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Summary:
    """All repeats of a cell on one server. Times are in seconds, throughput in output tokens/s of full loads.

    `per_depth[d - 1]` is the share of verifications that accepted at least d drafts; without a head `accept_length` is
    None and `per_depth` empty. `same_answers` is the share that is the plain server's first answer to the prompt, None
    where none was compared. `errors` counts failed requests by reason, `ended` conversations that lack later turns."""

    requests: int
    failed: int
    errors: dict[str, int]
    tpot: Spread | None
    ttft: Spread | None
    throughput: float
    accept_length: float | None
    per_depth: list[float]
    same_answers: float | None = None
    ended: dict[str, int] = field(default_factory=dict)

    @property
    def seconds_per_token(self) -> float:
        assert self.tpot is not None
        return self.tpot.median


@dataclass(frozen=True)
class SpeedUp:
    """Plain over the head for the median time per output token, that over plain for the throughput."""

    tpot: Interval | None
    throughput: Interval | None


@dataclass(frozen=True)
class Cell:
    """One prompt set at one concurrency. A side that was not measured is absent. `speed_ups` are over the plain one."""

    prompt_set: str
    concurrency: int
    sides: dict[Side, Summary]
    speed_ups: dict[Side, SpeedUp]


def gather_cells(loads: Iterable[MeasuredLoad]) -> list[Cell]:
    """Gather what was measured, in the order in which it first was."""
    found: dict[tuple[str, int], dict[Side, list[MeasuredLoad]]] = defaultdict(lambda: defaultdict(list))
    for load in loads:
        found[load.prompt_set, load.concurrency][load.side].append(load)
    return [
        Cell(
            prompt_set,
            concurrency,
            {side: summarise([load.result for load in measured]) for side, measured in sides.items()},
            {"head": compare(sides["plain"], sides["head"])} if len(sides) == 2 else {},
        )
        for (prompt_set, concurrency), sides in found.items()
    ]


def by_set(found: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Return the cells of each prompt set by rising concurrency."""
    sets: dict[str, list[Cell]] = defaultdict(list)
    for cell in sorted(found, key=lambda cell: cell.concurrency):
        sets[cell.prompt_set].append(cell)
    return dict(sorted(sets.items()))


def summarise(repeats: Sequence[LoadResult]) -> Summary:
    complete = [answer for result in repeats for answer in result.complete]
    verifications = sum(answer.verify_ct for answer in complete)
    accepted = sum(answer.correct_drafts for answer in complete)
    compared = sum(result.agreement.compared for result in repeats)
    return Summary(
        requests=sum(len(result.answers) for result in repeats),
        failed=sum(len(result.failed) for result in repeats),
        errors=dict(Counter(str(answer.error) for result in repeats for answer in result.failed)),
        tpot=percentiles([answer.tpot_s for answer in complete]),
        ttft=percentiles([answer.ttft_s for answer in complete]),
        throughput=sum(result.full_tokens for result in repeats) / sum(result.full_seconds for result in repeats),
        accept_length=1 + accepted / verifications if verifications else None,
        per_depth=acceptance_per_depth([answer.histogram for answer in complete]),
        same_answers=sum(result.agreement.same for result in repeats) / compared if compared else None,
        ended=dict(sum((Counter(result.ended) for result in repeats), Counter())),
    )


def percentiles(values: Sequence[float | None]) -> Spread | None:
    """Return median, p90 and p99 of the values that are there (an answer of one token has no time per token)."""
    known = [value for value in values if value is not None]
    return Spread(*np.percentile(known, [50, 90, 99]).tolist()) if known else None


def acceptance_per_depth(histograms: Sequence[Sequence[int]]) -> list[float]:
    """Return the shares of verifications that accepted 1, 2, … drafts or more, from counts of exactly 0, 1, 2, …"""
    exactly = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
    return [sum(exactly[depth:]) / sum(exactly) for depth in range(1, len(exactly))]


def compare(plain: Sequence[MeasuredLoad], head: Sequence[MeasuredLoad]) -> SpeedUp:
    """Compare the n-th repeat of the plain target with the n-th of the head; if servers were started more than once,
    all repeats of the n-th start with those of the n-th start."""
    started_again = any(load.start for load in (*plain, *head))
    before_after = [
        [[each.result for each in measured] for _, measured in groupby(side, key=lambda load: load.start)]
        if started_again
        else [[each.result] for each in side]
        for side in (plain, head)
    ]
    pairs = [(summarise(before), summarise(after)) for before, after in zip(*before_after, strict=False)]
    times = [(before.tpot, after.tpot) for before, after in pairs]
    return SpeedUp(
        tpot=mean_ratio([before.median / after.median for before, after in times if before and after]),
        throughput=mean_ratio(
            [after.throughput / before.throughput for before, after in pairs if before.throughput and after.throughput]
        ),
    )


def mean_ratio(ratios: Sequence[float]) -> Interval | None:
    """Return the geometric mean with a 95 % interval by Student's t on the logarithms of independent ratios."""
    if not ratios:
        return None
    mean = estimate_mean([math.log(ratio) for ratio in ratios])
    if mean.low is None or mean.high is None:
        return Interval(math.exp(mean.value), None, None)
    return Interval(math.exp(mean.value), math.exp(mean.low), math.exp(mean.high))


def stops_paying(speed_ups: Mapping[int, Interval]) -> int | None:
    """Return the lowest concurrency whose time per output token is not surely better than the plain target's."""
    least = {load: ratio.value if ratio.low is None else ratio.low for load, ratio in speed_ups.items()}
    return min((load for load, ratio in least.items() if ratio <= 1), default=None)
