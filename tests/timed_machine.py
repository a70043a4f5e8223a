"""A machine that times draft settings by a cost which the search does not know."""

from typing import Any

from eagle3.draft_shape import Shape
from eagle3.errors import InputError
from eagle3.serving.bench.stats import Spread, Summary
from eagle3.serving.tune.candidates import Gain, all_settings
from eagle3.serving.tune.search import Findings, search
from eagle3.settings.serving import TuneSettings

SETTINGS = all_settings(steps=[*range(1, 8)], topk=[1, 2, 4], draft_tokens=[4, 8, 16, 32, 64], draft_vocab_size=64)
CHAINS = [setting for setting in SETTINGS if setting.topk == 1]
PLAIN_SECONDS = 0.010
CHEAP = (0.012, 0.0001, 0.0006)
DEAR = (0.03, 0.001, 0.006)


def gain(setting: Shape) -> Gain:
    """A head whose drafts are right, one after the other, 7 times in 10, and more often with more of them."""
    right = 0.7 + 0.02 * (setting.topk - 1) * min(setting.draft_tokens / 16, 2)
    length = sum(right**depth for depth in range(setting.steps + 1))
    return Gain(length, 0.98 * length)


def summary(seconds: float, load: int, accept_length: float | None) -> Summary:
    return Summary(8, 0, {}, Spread(seconds, seconds, seconds), None, load / seconds, accept_length, [])


class Machine:
    """Times settings at each load by the seconds of a verification, of each of its tokens (the more the higher the
    load), and of each step; remembers which."""

    def __init__(self, cost: tuple[float, float, float], *, loads: tuple[int, ...] = (4,), broken: Any = ()) -> None:
        self.cost, self.loads, self.broken = cost, loads, broken
        self.asked: list[Shape | None] = []

    def seconds(self, setting: Shape, load: int = 4) -> float:
        fixed, token, step = self.cost
        return (fixed + token * load / 4 * setting.draft_tokens + step * setting.steps) / gain(setting).tokens

    def __call__(self, setting: Shape | None) -> dict[int, Summary]:
        self.asked.append(setting)
        if setting in self.broken:
            raise InputError("server 1 has ended: out of memory")
        length = gain(setting).accept_length if setting else None
        seconds = {load: self.seconds(setting, load) if setting else PLAIN_SECONDS for load in self.loads}
        return {load: summary(took, load, length) for load, took in seconds.items()}


def settings(**changes: Any) -> TuneSettings:
    given = {
        "concurrency": 4, "loads": None, "steps": [*range(1, 8)], "topk": [1], "draft_tokens": [], "draft_window": None,
        "batch_size": 1, "timed": 4, "warmup": 0, "timeout_s": 60.0, "requests_per_place": 1,
        "assumed": {"compute_bound_tokens": 200, "step": 0.1},
    }  # fmt: skip
    return TuneSettings(**given | changes)


def tuned(machine: Machine, *, kept: list[int] | None = None, **changes: Any) -> Findings:
    gains = {setting: gain(setting) for setting in (CHAINS if changes.get("loads") else SETTINGS)}
    return search(settings(**changes), gains, machine, lambda found: (kept or []).append(len(found.timed)))
