"""A machine that times draft settings by a cost which the search does not know."""

from typing import Any

from eagle3.errors import InputError
from eagle3.serving.tune.predict import Gain, Setting, VerificationCost, all_settings
from eagle3.serving.tune.search import SearchState, search_settings
from eagle3.serving.tune.timing import LoadTiming
from eagle3.settings.serving import TuneSettings

SETTINGS = all_settings(steps=[*range(1, 8)], topk=[1, 2, 4], draft_tokens=[4, 8, 16, 32, 64], draft_vocab_size=64)
PLAIN_SECONDS = 0.010
CHEAP = VerificationCost(fixed=0.012, draft_token=0.0001, step=0.0006)
DEAR = VerificationCost(fixed=0.03, draft_token=0.001, step=0.006)


def gain(setting: Setting) -> Gain:
    """A head whose drafts are right, one after the other, 7 times in 10, and more often with more of them."""
    right = 0.7 + 0.02 * (setting.topk - 1) * min(setting.draft_tokens / 16, 2)
    length = sum(right**depth for depth in range(setting.steps + 1))
    return Gain(length, 0.98 * length)


class Machine:
    """Times settings by a cost that the search does not know, and remembers which."""

    def __init__(self, cost: VerificationCost, *, broken: tuple[Setting, ...] = ()) -> None:
        self.cost, self.broken = cost, broken
        self.asked: list[Setting | None] = []

    def seconds(self, setting: Setting) -> float:
        return self.cost.seconds(setting) / gain(setting).tokens

    def __call__(self, setting: Setting | None) -> LoadTiming:
        self.asked.append(setting)
        if setting in self.broken:
            raise InputError("server 1 has ended: out of memory")
        seconds = self.seconds(setting) if setting else PLAIN_SECONDS
        per_depth = [0.7**depth for depth in range(1, setting.steps + 1)] if setting else []  # of a chain
        return LoadTiming(
            seconds, 1 / seconds, gain(setting) if setting else None, per_depth, same_answers=None, requests=8, failed=0
        )


def settings(**changes: Any) -> TuneSettings:
    given = {
        "concurrency": 4, "loads": None, "steps": [1, 2, 7], "topk": [1], "draft_tokens": [], "evidence": "decoder",
        "batch_size": 1, "timed": 4, "warmup": 0, "timeout_s": 9.0, "requests_per_place": 1,
        "assumed": {"compute_bound_tokens": 200, "step": 0.1}, "rows": 6,
    }  # fmt: skip
    return TuneSettings(**given | changes)


def tuned(machine: Machine, *, gains: Any = "all", kept: list[int] | None = None, **changes: Any) -> SearchState:
    gains = {setting: gain(setting) for setting in SETTINGS} if gains == "all" else gains
    return search_settings(settings(**changes), gains, machine, lambda found: (kept or []).append(len(found.timed)))
