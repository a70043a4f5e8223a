"""The search finds the fastest setting with few timings, and survives what cannot be timed."""

import random

import pytest
from timed_machine import CHEAP, DEAR, PLAIN_SECONDS, SETTINGS, Machine, gain, tuned

from eagle3.errors import InputError
from eagle3.serving.tune.predict import FittedCost, Setting, VerificationCost


@pytest.mark.parametrize("cost", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_the_fastest_of_all_settings_is_found_with_the_plain_target_and_four_timings(cost: VerificationCost) -> None:
    machine = Machine(cost)
    found = tuned(machine)
    fastest = min(machine.seconds(setting) for setting in SETTINGS)
    assert machine.asked[0] is None and len(machine.asked) <= 1 + 4
    assert len(SETTINGS) == 40 and found.best()[1] <= 1.03 * fastest


def test_over_many_machines_what_is_found_is_near_the_fastest_and_uncertainty_has_a_part_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def average_loss() -> float:
        draw, losses = random.Random(0), []
        for _ in range(60):
            parts = (draw.uniform(0.9, 3), 10 ** draw.uniform(-2.7, -1), 10 ** draw.uniform(-1.7, 0))
            machine = Machine(VerificationCost(*(PLAIN_SECONDS * part for part in parts)))
            fastest = min(machine.seconds(setting) for setting in SETTINGS)
            losses.append(tuned(machine).best()[1] / fastest - 1)
        return sum(losses) / len(losses)

    loss = average_loss()
    assert loss < 0.02
    monkeypatch.setattr(FittedCost, "standard_deviation", lambda cost, setting: 0.0)
    assert loss < average_loss()


def test_a_timing_changes_what_is_timed_next() -> None:
    first, second = (tuned(Machine(cost)).timed for cost in (CHEAP, DEAR))
    assert next(iter(first)) == next(iter(second)) and [*first][1:] != [*second][1:]


def test_no_setting_is_timed_twice_even_when_more_are_asked_for_than_there_are() -> None:
    machine = Machine(CHEAP)
    found = tuned(machine, timed=50)
    assert sorted(machine.asked[1:]) == sorted(found.timed) == SETTINGS  # type: ignore[type-var]


def test_without_timings_no_server_is_asked_and_times_are_in_units_of_the_plain_target() -> None:
    machine = Machine(CHEAP)
    found = tuned(machine, timed=0)
    assert machine.asked == [] and found.plain is None
    setting, seconds = found.best()
    assert found.speed_up(seconds) == pytest.approx(gain(setting).tokens / found.assumed.seconds(setting))


def test_what_a_server_counts_with_the_longest_chain_predicts_the_others() -> None:
    machine = Machine(CHEAP)
    found = tuned(machine, gains=None, timed=2)
    assert machine.asked[:2] == [None, Setting(7, 1, 8)]
    assert [*found.gains] == [(1, 1, 2), (2, 1, 3), (7, 1, 8)]
    for chain, predicted in found.gains.items():
        assert predicted.accept_length == pytest.approx(gain(chain).accept_length, rel=0.02)


def test_a_setting_that_cannot_run_is_noted_and_the_others_are_timed() -> None:
    first = next(iter(tuned(Machine(CHEAP)).timed))
    machine = Machine(CHEAP, broken=(first,))
    found = tuned(machine)
    assert first not in found.timed and found.timed
    assert found.failed == {first: "server 1 has ended: out of memory"}
    with pytest.raises(InputError, match=r"none of the settings could be timed, .* out of memory"):
        tuned(Machine(CHEAP, broken=tuple(SETTINGS)))


def test_a_plain_target_that_cannot_run_ends_the_search() -> None:
    with pytest.raises(InputError, match="out of memory"):
        tuned(Machine(CHEAP, broken=(None,)))  # type: ignore[arg-type]
