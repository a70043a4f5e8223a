"""The search for the draft setting with the least time per token, cheapest evidence first.

Every setting's gain is predicted, and its time per token from what a round is assumed to cost; then the best predicted
setting is timed on a server, the cost of a round is fitted to what was timed, and all others are ranked again."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eagle3.errors import InputError
from eagle3.serving.tune.evidence import TuneSettings, server_gains
from eagle3.serving.tune.predict import FittedCost, Gain, RoundCost, Setting, assumed_cost, fitted_cost
from eagle3.serving.tune.timing import Timed, Timer

log = logging.getLogger(__name__)


@dataclass
class Search:
    """All that is known about the settings. Times are in seconds, without `plain` in units of its time per token.

    `expected` holds what was predicted for a setting just before it was timed."""

    gains: Mapping[Setting, Gain]
    assumed: RoundCost
    plain: Timed | None
    timed: dict[Setting, Timed] = field(default_factory=dict)
    expected: dict[Setting, float] = field(default_factory=dict)
    failed: dict[Setting, str] = field(default_factory=dict)

    def cost(self) -> FittedCost:
        return fitted_cost({setting: timed.round_seconds for setting, timed in self.timed.items()}, self.assumed)

    def predicted(self) -> dict[Setting, float]:
        """Seconds per token by the present cost of a round, best first."""
        cost = self.cost().cost
        return _in_order({setting: cost.seconds(setting) / gain.tokens for setting, gain in self.gains.items()})

    def best(self) -> tuple[Setting, float]:
        """The fastest setting and its seconds per token: of the timed ones, where there are any."""
        times = {setting: timed.seconds_per_token for setting, timed in self.timed.items()} or self.predicted()
        return min(times.items(), key=lambda item: item[1])

    def speed_up(self, seconds: float) -> float:
        """Over the plain target."""
        return (self.plain.seconds_per_token if self.plain else 1.0) / seconds

    def next(self) -> Setting | None:
        """The setting to time: the best predicted, then the one that would be the fastest if its round took less than
        predicted by as much as is likely: what is uncertain is worth more than a neighbour of what is known."""
        times = self.predicted()
        if self.timed:
            cost = self.cost()
            times = _in_order({s: seconds - cost.doubt(s) / self.gains[s].tokens for s, seconds in times.items()})
        return next((setting for setting in times if setting not in self.timed and setting not in self.failed), None)

    def time(self, setting: Setting, timer: Timer) -> None:
        """A server that cannot run the setting (memory, say) is a finding, not the end of the search."""
        self.expected[setting] = self.predicted()[setting]
        try:
            self.timed[setting] = timer(setting)
        except InputError as reason:
            self.failed[setting] = str(reason)
            log.warning("%s: %s", setting.flags, reason)


def search(
    settings: TuneSettings, gains: Mapping[Setting, Gain] | None, timer: Timer, keep: Callable[[Search], None]
) -> Search:
    """Search among the settings of `gains`, or where that is None among chains, by what a server says they gain.

    `keep` is called with what is known before anything is timed, and after each timing."""
    if gains is not None:
        keep(Search(gains, assumed_cost(1.0, concurrency=settings.concurrency, **settings.assumed), None))
    plain = timer(None) if settings.timed else None
    unit = plain.seconds_per_token if plain else 1.0
    assumed = assumed_cost(unit, concurrency=settings.concurrency, **settings.assumed)
    timed: dict[Setting, Timed] = {}
    if gains is None:
        gains, timed = server_gains(settings, timer)
    found = Search(gains, assumed, plain, timed)
    keep(found)
    while len(found.timed) + len(found.failed) < settings.timed:
        setting = found.next()
        if setting is None:
            break
        found.time(setting, timer)
        keep(found)
    if settings.timed and not found.timed:
        raise InputError(f"none of the settings could be timed, the last: {[*found.failed.values()][-1]}")
    return found


def _in_order(times: dict[Setting, float]) -> dict[Setting, float]:
    return dict(sorted(times.items(), key=lambda item: item[1]))
