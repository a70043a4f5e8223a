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
    """Everything that is known about the settings. `plain` and `timed` are by the number of concurrent requests.

    `plain` is empty if nothing was timed; `failed` holds reasons."""

    settings: TuneSettings
    gains: Mapping[Shape, Gain]
    plain: dict[int, Summary] = field(default_factory=dict)
    timed: dict[Shape, dict[int, Summary]] = field(default_factory=dict)
    failed: dict[Shape, str] = field(default_factory=dict)

    def predicted(self, setting: Shape, load: int) -> float:
        return self.gains[setting].predicted_speed_up(setting, concurrency=load, **self.settings.assumed)

    def speed_up(self, setting: Shape, load: int) -> float:
        """Return the speed-up in time per token over the plain target, measured if the setting was timed."""
        if setting in self.timed:
            return self.plain[load].seconds_per_token / self.timed[setting][load].seconds_per_token
        return self.predicted(setting, load)

    def mean_speed_up(self, setting: Shape, loads: Sequence[int]) -> float:
        """Return the geometric mean over the loads."""
        return math.prod(self.speed_up(setting, load) for load in loads) ** (1 / len(loads))

    def best(self, *loads: int) -> Shape:
        """Return the setting with the highest mean speed-up over the loads, of the timed ones if there are any."""
        return max(self.timed or self.gains, key=lambda setting: self.mean_speed_up(setting, loads))

    def ranked(self) -> list[Shape]:
        """Return the replayed settings, the best predicted over all loads first."""
        loads = self.settings.all_loads
        return sorted(self.gains, key=lambda setting: -math.prod(self.predicted(setting, load) for load in loads))

    def steps(self) -> dict[int, int]:
        """Return the steps of the fastest timed chain at each load, 0 where none beats the plain target."""
        best = {load: self.best(load) for load in self.plain if self.timed}
        return {load: chain.steps if self.speed_up(chain, load) > 1 else 0 for load, chain in best.items()}

    def plain_from(self) -> int | None:
        """Return the number of running requests from which no chain pays any more; None if one pays at the last load.

        A lower load at which none pays does not count."""
        begin, steps = max(thresholds(self.steps()).items())
        return None if steps else begin


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
    return found


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
