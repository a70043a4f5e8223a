"""The race with SpecForge: our side of it runs, and its goal is what it says."""

import pytest
from race import GOAL, SMALL_BATCHES, over_peers, seconds_to_the_same, time_steps

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")


def test_our_steps_are_timed() -> None:
    found = time_steps({"batches": list(SMALL_BATCHES), "small": True, "vocab": None, "overrides": ["ttt_steps=2"]})
    assert list(found) == list(SMALL_BATCHES)
    assert all(cost["tokens_per_s"] > 0 and cost["slowest_ms"] >= cost["step_ms"] for cost in found.values())


def test_our_rates_are_compared_with_each_peers_fastest_at_its_own_settings() -> None:
    rates = {"bf16, as SpecForge": 40, "bf16": 30, "fp8": 45, "SpecForge, joined": 20, "SpecForge, alone": 5}
    costs = {way: {"tokens_per_s": rate} for way, rate in rates.items()}
    assert over_peers(costs) == {"SpecForge": {"bf16, as SpecForge": 2}, "speculators": {}}
    costs["speculators"] = {"tokens_per_s": 15}
    assert over_peers(costs)["speculators"] == {"bf16": 2, "fp8": 3}


def test_seconds_are_counted_to_what_the_best_specforge_head_accepts_at_its_end() -> None:
    def curve(*lengths: float, seconds: float) -> list[dict[str, object]]:
        return [{"seconds": seconds * (1 + n), "accept_length": {GOAL: each}} for n, each in enumerate(lengths)]

    curves = {
        "SpecForge, lr 0.0001": curve(1.2, 1.5, 1.6, seconds=10),
        "SpecForge, lr 0.001": curve(1.9, 2.1, 2.0, seconds=10),
        "ours, recipe": curve(1.8, 2.0, 2.3, seconds=2),
        "ours, other": curve(1.8, 1.9, 1.9, seconds=2),
    }
    found = seconds_to_the_same(curves, GOAL)
    assert found["accept_length"] == 2.0
    assert found["seconds_until"] == {
        "SpecForge, lr 0.0001": None, "SpecForge, lr 0.001": 20, "ours, recipe": 4, "ours, other": None
    }  # fmt: skip
    assert found["share_of_specforge"] == {"SpecForge, lr 0.001": 1, "ours, recipe": 0.2}
