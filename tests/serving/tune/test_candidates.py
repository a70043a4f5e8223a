"""Settings to choose among, and their replayed accept lengths."""

import pytest
import torch

from eagle3.decoding.replay import Recording
from eagle3.draft_shape import Shape
from eagle3.errors import InputError
from eagle3.serving.tune.candidates import Gain, all_settings, replayed_gains


def test_settings_are_chains_of_every_length_and_trees_that_can_be_filled():
    found = all_settings(steps=[1, 3], topk=[1, 2], draft_tokens=[2, 3, 4, 11, 12], draft_vocab_size=9)
    assert found == [(1, 1, 2), (1, 2, 2), (1, 2, 3), (3, 1, 4), (3, 2, 4), (3, 2, 11)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": [10]}, r"tune\.topk=10: the head can draft no more than its 9 tokens"),
        ({"topk": [2], "draft_tokens": [3]}, r"holds no tree: it has from steps \+ 1"),
    ],
)
def test_bad_settings_name_their_keys(changes, message):
    given = {"steps": [3], "topk": [1, 4], "draft_tokens": [8], "draft_vocab_size": 9}
    with pytest.raises(InputError, match=message):
        all_settings(**given | changes)


def test_replayed_gains_are_sums_over_answers_with_an_error_over_conversations():
    """Two answers of 3 and 4 tokens after the first: drafts are right everywhere (0) or nowhere (9)."""
    right, wrong = torch.zeros(3, 2, 2), torch.full((4, 2, 2), 9.0)
    recording = Recording({1: [right.int(), wrong.int(), wrong.int()[:0]]})  # the third is one token long
    chain = Shape(2, 1, 3)
    [gain] = replayed_gains(recording, [0, 1, 1], [chain]).values()
    assert (gain.accept_length, gain.tokens, gain.prompts) == (1 + 2 / 5, 7 / 5, 3)  # one verification and four
    assert gain.standard_error == pytest.approx(1.0)  # the accept lengths without one or the other: 1 and 3
    [of_one] = replayed_gains(recording, [0, 0, 0], [chain]).values()
    assert (of_one.accept_length, of_one.standard_error) == (gain.accept_length, None)
    [alone] = replayed_gains(Recording({1: [right.int()]}), [0], [chain]).values()
    assert (alone.accept_length, alone.tokens, alone.standard_error) == (3.0, 3.0, None)
    with pytest.raises(InputError, match="none of 1 answers was longer than one token"):
        replayed_gains(Recording({1: [right.int()[:0]]}), [0], [chain])


def test_the_predicted_speed_up_falls_with_steps_and_with_verified_tokens_the_more_the_higher_the_load():
    def predicted(setting: Shape, concurrency: int) -> float:
        return Gain(3.0, 3.0).predicted_speed_up(setting, concurrency=concurrency, compute_bound_tokens=200, step=0.1)

    assert predicted(Shape(0, 1, 1), 8) == 3.0  # a verification that costs what a plain forward pass costs
    assert predicted(Shape(2, 1, 1), 8) == pytest.approx(3.0 / 1.2)
    assert predicted(Shape(0, 1, 201), 200) == pytest.approx(3.0 / 101)  # half of a plain pass is computing
    assert predicted(Shape(3, 4, 16), 1) > predicted(Shape(3, 4, 16), 64)
