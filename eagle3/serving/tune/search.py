"""The search for the draft setting with the least time per token, cheapest evidence first.

Every setting's gain is predicted, and its time per token from what a verification is assumed to cost; then the best
predicted setting is timed on a server, that cost is fitted to what was timed, and all others are ranked again."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eagle3.errors import InputError
from eagle3.serving.tune.evidence import server_gains
from eagle3.serving.tune.predict import FittedCost, Gain, Setting, VerificationCost, assumed_cost, fitted_cost
from eagle3.serving.tune.timing import LoadTiming, Timer
from eagle3.settings.serving import TuneSettings

log = logging.getLogger(__name__)


@dataclass
class SearchState:
    """All that is known about the settings. Times are in seconds, without `plain` in units of its time per token.

    `expected` holds what was predicted for a setting just before it was timed."""

    gains: Mapping[Setting, Gain]
    assumed: VerificationCost
    plain: LoadTiming | None
    timed: dict[Setting, LoadTiming] = field(default_factory=dict)
    expected: dict[Setting, float] = field(default_factory=dict)
    failed: dict[Setting, str] = field(default_factory=dict)

    def cost(self) -> FittedCost:
        return fitted_cost({each: timing.verification_seconds for each, timing in self.timed.items()}, self.assumed)

    def predicted(self) -> dict[Setting, float]:
        """Return seconds per token by the present cost of a verification, best first."""
        cost = self.cost().cost
        return _in_order({setting: cost.seconds(setting) / gain.tokens for setting, gain in self.gains.items()})

    def best(self) -> tuple[Setting, float]:
        """Return the fastest setting and its seconds per token: of the timed ones, where there are any."""
        times = {setting: timing.seconds_per_token for setting, timing in self.timed.items()} or self.predicted()
        return min(times.items(), key=lambda item: item[1])

    def speed_up(self, seconds: float) -> float:
        """Return the speed-up over the plain target."""
        return (self.plain.seconds_per_token if self.plain else 1.0) / seconds

    def next_to_time(self) -> Setting | None:
        """Return the setting to time: the best predicted, then the one that would be the fastest if its verification
        took less than predicted by a standard deviation: what is uncertain is worth more than what is known."""
        times = self.predicted()
        if self.timed:
            cost = self.cost()
            hopes = {s: times[s] - cost.standard_deviation(s) / self.gains[s].tokens for s in times}
            times = _in_order(hopes)
        return next((setting for setting in times if setting not in self.timed and setting not in self.failed), None)

    def time(self, setting: Setting, timer: Timer) -> None:
        """Time a setting; a server that cannot run it (memory, say) is a finding, not the end of the search."""
        try:
            self.note(setting, timer(setting))
        except InputError as reason:
            self.note(setting, str(reason))
            log.warning("%s: %s", setting.flags, reason)

    def note(self, setting: Setting, found: LoadTiming | str) -> None:
        """Add a timing, or the reason for which there is none."""
        self.expected[setting] = self.predicted()[setting]
        if isinstance(found, str):
            self.failed[setting] = found
        else:
            self.timed[setting] = found


def search_settings(
    settings: TuneSettings, gains: Mapping[Setting, Gain] | None, timer: Timer, keep: Callable[[SearchState], None]
) -> SearchState:
    """Search among the settings of `gains`, or where that is None among chains, by what a server says they gain.

    `keep` is called with what is known before anything is timed, and after each timing."""
    if gains is not None:
        keep(SearchState(gains, assumed_cost(1.0, concurrency=settings.concurrency, **settings.assumed), None))
    plain = timer(None) if settings.timed else None
    unit = plain.seconds_per_token if plain else 1.0
    assumed = assumed_cost(unit, concurrency=settings.concurrency, **settings.assumed)
    timed: dict[Setting, LoadTiming] = {}
    if gains is None:
        gains, timed = server_gains(settings, timer)
    found = SearchState(gains, assumed, plain, timed)
    keep(found)
    while len(found.timed) + len(found.failed) < settings.timed:
        setting = found.next_to_time()
        if setting is None:
            break
        found.time(setting, timer)
        keep(found)
    if settings.timed and not found.timed:
        raise InputError(f"none of the settings could be timed, the last: {[*found.failed.values()][-1]}")
    return found


def _in_order(times: dict[Setting, float]) -> dict[Setting, float]:
    return dict(sorted(times.items(), key=lambda item: item[1]))
