"""The search for the fastest draft settings: replay ranks them, then a few are timed on servers."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from eagle3.draft_shape import Shape
from eagle3.errors import InputError
from eagle3.serving.bench.stats import Summary
from eagle3.serving.tune.candidates import Gain
from eagle3.serving.tune.timing import ServerTimer
from eagle3.settings.serving import TuneSettings

log = logging.getLogger(__name__)


@dataclass
class Findings:
    """Everything that is known about the settings. `plain`, `timed` and `no_steps` are by the number of concurrent
    requests.

    `plain` is empty if nothing was timed; `failed` holds reasons. `no_steps` are the loads at which a server with the
    head was timed without drafting."""

    settings: TuneSettings
    gains: Mapping[Shape, Gain]
    plain: dict[int, Summary] = field(default_factory=dict)
    timed: dict[Shape, dict[int, Summary]] = field(default_factory=dict)
    failed: dict[Shape, str] = field(default_factory=dict)
    no_steps: dict[int, Summary] = field(default_factory=dict)

    def predicted(self, setting: Shape, load: int) -> float:
        return self.gains[setting].predicted_speed_up(setting, concurrency=load, **self.settings.assumed)

    def speed_up(self, setting: Shape, load: int) -> float:
        """Return the speed-up in time per token over the plain target, measured if the setting was timed."""
        if setting in self.timed:
            return self.plain[load].seconds_per_token / self.timed[setting][load].seconds_per_token
        return self.predicted(setting, load)

    def best(self, load: int) -> Shape:
        """Return the fastest setting, of the timed ones if there are any."""
        return max(self.timed or self.gains, key=lambda setting: self.speed_up(setting, load))

    def ranked(self) -> list[Shape]:
        """Return the replayed settings, the best predicted over all loads first."""
        loads = self.settings.all_loads
        return sorted(self.gains, key=lambda setting: -math.prod(self.predicted(setting, load) for load in loads))

    def lost(self) -> list[int]:
        """Return the loads at which no timed chain beats the plain target."""
        return [load for load in self.plain if self.speed_up(self.best(load), load) <= 1]

    def served(self, load: int) -> tuple[int, Summary]:
        """Return the steps of the fastest timed chain, or 0 if not drafting is faster, and their timing."""
        chain = self.best(load)
        choices = [(chain.steps, self.timed[chain][load])]
        if load in self.no_steps:
            choices.append((0, self.no_steps[load]))
        return min(choices, key=lambda choice: choice[1].seconds_per_token)

    def steps(self) -> dict[int, int]:
        return {load: self.served(load)[0] for load in self.plain}


def search(
    settings: TuneSettings,
    gains: Mapping[Shape, Gain],
    timer: ServerTimer,
    keep: Callable[[Findings], object],
) -> Findings:
    """Time `tune.timed` settings, the best predicted by `gains`.

    `keep` is called with the findings before anything is timed and after each server."""
    found = Findings(settings, gains)
    keep(found)
    if not settings.timed:
        return found
    found.plain = timer(None)
    for setting in most_promising(found.ranked(), settings.timed):
        try:
            found.timed[setting] = timer(setting)
        except InputError as reason:  # out of memory, for example: the other settings are still timed
            found.failed[setting] = str(reason)
            log.warning("%s: %s", setting, reason)
        keep(found)
    if not found.timed:
        raise InputError(f"none of the settings could be timed, the last: {[*found.failed.values()][-1]}")
    if settings.loads and 0 < len(found.lost()) < len(found.plain):
        _time_without_steps(found, timer)
        keep(found)
    return found


def _time_without_steps(found: Findings, timer: ServerTimer) -> None:
    """Time 0 steps where no chain pays.

    SGLang then still verifies each token. Where it ran the head, too, a token took 7 and 10 % longer at 64 requests
    than on the plain server (benchmarks/results/sglang_bench_smollm2_adaptive_0.json)."""
    steps = {**found.steps(), **dict.fromkeys(found.lost(), 0)}
    try:
        found.no_steps = timer.adaptive(thresholds(steps), found.lost())
    except InputError as reason:
        log.warning("0 steps: %s", reason)


def most_promising(ranked: Sequence[Shape], number: int) -> list[Shape]:
    """Return the best setting of each number of steps first, then the others.

    Settings that differ in topk or draft tokens alone are predicted within a few per cent of each other: timing the
    best few of these would test one guess of the cost of a step."""
    firsts: dict[int, Shape] = {}
    for setting in ranked:
        firsts.setdefault(setting.steps, setting)
    return [*dict.fromkeys([*firsts.values(), *ranked])][:number]


def thresholds(steps: Mapping[int, int]) -> dict[int, int]:
    """Return from how many running requests on a chain has how many steps: halfway, by ratio, between measured loads.

    A server with 64 places runs fewer requests whenever some have ended, and should then draft as at 64, not as at 32.
    """
    loads = sorted(steps)
    found = {loads[0]: steps[loads[0]]}
    for below, load in pairwise(loads):
        if steps[load] != steps[below]:
            found[math.ceil(math.sqrt(below * load))] = steps[load]
    return found
