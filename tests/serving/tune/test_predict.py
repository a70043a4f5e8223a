"""The tokens of a round from a server's counts, and its time from few timings."""

from random import Random

import pytest
import torch

from eagle3.decoding.replay import Recording
from eagle3.errors import InputError
from eagle3.serving.tune.predict import (
    Gain,
    Setting,
    VerificationCost,
    all_settings,
    assumed_cost,
    chain_gains,
    fitted_cost,
    replayed_gains,
)

ASSUMED = VerificationCost(fixed=8.0, draft_token=0.5, step=1.0)
TRUE = VerificationCost(fixed=10.0, draft_token=0.1, step=2.0)


def test_settings_are_chains_of_every_length_and_trees_that_can_be_filled() -> None:
    found = all_settings(steps=[1, 3], topk=[1, 2], draft_tokens=[2, 3, 4, 11, 12], draft_vocab_size=9)
    assert found == [(1, 1, 2), (1, 2, 2), (1, 2, 3), (3, 1, 4), (3, 2, 4), (3, 2, 11)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": [10]}, r"tune\.topk=\[10\]: the head can draft no more than its 9 tokens"),
        ({"topk": [2], "draft_tokens": [3]}, r"holds no tree: it has from steps \+ 1"),
    ],
)
def test_bad_settings_name_their_keys(changes: dict, message: str) -> None:
    given = {"steps": [3], "topk": [1, 4], "draft_tokens": [8], "draft_vocab_size": 9}
    with pytest.raises(InputError, match=message):
        all_settings(**given | changes)


def chain_rounds(is_right: list[bool], steps: int) -> list[int]:
    """How many drafts each round accepts where each token is drafted right or wrong, wherever the round begins."""
    rounds, position = [], 0
    while position < len(is_right):
        accepted = 0
        while accepted < steps and position + accepted < len(is_right) and is_right[position + accepted]:
            accepted += 1
        rounds.append(accepted)
        position += accepted + 1
    return rounds


def test_what_the_longest_chain_accepts_says_what_shorter_ones_gain() -> None:
    draw = Random(0)
    runs = [int(draw.expovariate(0.5)) for _ in range(20_000)]
    is_right = [right for run in runs for right in [True] * run + [False]]
    chains = all_settings(steps=[1, 2, 3, 4, 5], topk=[1], draft_tokens=[], draft_vocab_size=1)
    rounds = chain_rounds(is_right, 5)
    per_depth = [sum(accepted >= depth for accepted in rounds) / len(rounds) for depth in range(1, 6)]
    longest = Gain(accept_length=1 + sum(per_depth), tokens=2.0)
    gains = chain_gains(per_depth, longest, chains)
    assert [*gains] == chains and gains[chains[-1]] == pytest.approx(longest)
    for chain, gain in gains.items():
        counted = chain_rounds(is_right, chain.steps)
        assert gain.accept_length == pytest.approx(1 + sum(counted) / len(counted), rel=0.025)
        assert gain.tokens / gain.accept_length == pytest.approx(2.0 / longest.accept_length)


def test_what_is_replayed_is_summed_over_answers_and_sure_over_prompts() -> None:
    """Two answers of 3 and 4 tokens behind the first: drafts are right at every place (0) or at none (9)."""
    right, wrong = torch.zeros(3, 2, 2), torch.full((4, 2, 2), 9.0)
    recording = Recording({1: [right.int(), wrong.int(), wrong.int()[:0]]})  # the third is one token long
    chain = Setting(2, 1, 3)
    [gain] = replayed_gains(recording, [chain]).values()
    assert (gain.accept_length, gain.tokens) == (1 + 2 / 5, 7 / 5)  # one verification and four
    assert gain.standard_error == pytest.approx(1.0)  # the accept lengths without one or the other: 1 and 3
    [alone] = replayed_gains(Recording({1: [right.int()]}), [chain]).values()
    assert (alone.accept_length, alone.tokens, alone.standard_error) == (3.0, 3.0, None)
    with pytest.raises(InputError, match=r"no answer was longer than one token"):
        replayed_gains(Recording({1: [right.int()[:0]]}), [chain])


def test_depths_that_no_round_reached_may_be_left_out_as_servers_do() -> None:
    chains = [Setting(1, 1, 2), Setting(5, 1, 6)]
    assert chain_gains([0.5], Gain(1.5, 1.5), chains) == chain_gains([0.5, 0, 0, 0, 0], Gain(1.5, 1.5), chains)
    assert chain_gains([], Gain(1.0, 1.0), chains)[chains[0]] == pytest.approx(Gain(1.0, 1.0))


def test_before_any_timing_a_round_costs_what_was_assumed() -> None:
    assert fitted_cost({}, ASSUMED).cost == pytest.approx(ASSUMED)


def test_timings_replace_what_was_assumed() -> None:
    settings = [Setting(1, 1, 2), Setting(7, 1, 8), Setting(3, 4, 32), Setting(5, 8, 64)]
    fitted = fitted_cost({setting: TRUE.seconds(setting) for setting in settings}, ASSUMED).cost
    other = Setting(4, 4, 48)
    assert fitted.seconds(other) == pytest.approx(TRUE.seconds(other), rel=0.01)
    assert abs(ASSUMED.seconds(other) / TRUE.seconds(other) - 1) > 0.5


def test_one_timing_corrects_the_setting_that_was_timed() -> None:
    setting = Setting(5, 4, 16)
    fitted = fitted_cost({setting: 3 * ASSUMED.seconds(setting)}, ASSUMED).cost
    assert fitted.seconds(setting) == pytest.approx(3 * ASSUMED.seconds(setting), rel=0.01)


def test_what_is_like_a_timed_setting_is_known_better_than_what_is_not() -> None:
    timed, like, unlike = Setting(5, 4, 16), Setting(5, 4, 20), Setting(7, 8, 64)
    before, after = fitted_cost({}, ASSUMED), fitted_cost({timed: TRUE.seconds(timed)}, ASSUMED)
    assert after.standard_deviation(timed) == pytest.approx(0.02 * TRUE.seconds(timed), rel=0.01)
    assert (
        after.standard_deviation(timed)
        < after.standard_deviation(like)
        < after.standard_deviation(unlike)
        < before.standard_deviation(unlike)
    )


def test_no_part_of_a_round_costs_less_than_nothing() -> None:
    fitted = fitted_cost({Setting(1, 4, 4): 10.0, Setting(7, 4, 16): 9.0, Setting(7, 4, 64): 8.0}, ASSUMED).cost
    assert min(fitted.fixed, fitted.draft_token, fitted.step) >= 0


def test_the_assumed_plain_forward_takes_the_plain_time_whatever_the_concurrency() -> None:
    for concurrency in (1, 8, 64):
        cost = assumed_cost(4.0, concurrency=concurrency, compute_bound_tokens=200, step=0.1)
        assert cost.fixed + cost.draft_token == pytest.approx(4.0)
        assert cost.step == pytest.approx(0.4)
    assert cost.draft_token == pytest.approx(4.0 * 64 / 264)  # at 64 requests
