"""What is replayed from one recording is, count by count, what decoding with each setting measures."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from fitted_head import LAYERS, NEW_TOKENS, PROMPT, chain_output, fitted_head, small_target
from leave_one_out import leave_one_out_error

from eagle3.decoding import batched_trees
from eagle3.decoding.batched_trees import NOWHERE
from eagle3.decoding.drafter import Drafter
from eagle3.decoding.replay import answer_all, record
from eagle3.decoding.speculate import Speculator, measure, plain_greedy
from eagle3.draft_shape import Shape
from eagle3.serving.tune.candidates import replayed_gains
from eagle3.target.capture import Capture

PROMPTS = [PROMPT, PROMPT[4:], PROMPT[9:]]
SETTINGS = [
    *({"steps": steps, "topk": 1, "draft_tokens": steps + 1} for steps in (1, 2, 3, 5)),
    {"steps": 1, "topk": 3, "draft_tokens": 2},
    {"steps": 1, "topk": 3, "draft_tokens": 4},
    {"steps": 2, "topk": 2, "draft_tokens": 4},
    {"steps": 3, "topk": 2, "draft_tokens": 11},
    {"steps": 4, "topk": 3, "draft_tokens": 9},
    {"steps": 5, "topk": 4, "draft_tokens": 6},
    {"steps": 5, "topk": 4, "draft_tokens": 32},
]
DECODING = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "seed": 0, "progress": None}


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def head(target):
    return fitted_head(target, PROMPT)


def recorded(target, head, prompts=PROMPTS, draft_window=None, **changes):
    answers = answer_all(target, prompts, **{**DECODING, "beyond": 5, "batch_size": 2} | changes)
    shapes = {"steps": 5, "topks": [1, 2, 3, 4], "draft_window": draft_window}
    return record(Speculator(target, head, LAYERS), answers, **shapes)


def decoded(target, head, prompts=PROMPTS, **settings):
    answers = measure(target, head, LAYERS, prompts, **DECODING | settings).decoded
    accepted = [sum(depth) for depth in zip(*(answer.accepted for answer in answers), strict=True)]
    return sum(answer.verifications for answer in answers), accepted


class All(NamedTuple):
    verifications: int
    accepted: list[int]
    tokens: int


def replay(recording, *, steps, **setting):
    each = recording.replay_each(steps=steps, **setting)
    gained = [gain for rounds in each for gain in rounds.gained]
    accepted = [sum(gain >= depth for gain in gained) for depth in range(1, steps + 1)]
    return All(len(gained), accepted, sum(rounds.tokens for rounds in each))


@pytest.fixture(scope="module")
def recording(target, head):
    return recorded(target, head)


def test_answers_in_batches_by_length_are_in_the_order_of_their_prompts(target):
    prompts = [PROMPT[:length] for length in (5, 2, 4, 3)]
    options = {**DECODING, "beyond": 2}
    together = answer_all(target, prompts, batch_size=2, **options)
    alone = [answer_all(target, [prompt], batch_size=1, **options)[0] for prompt in prompts]
    assert [each.prompt for each in together] == prompts and together == alone


@pytest.mark.shapes
def test_a_head_with_one_norm_before_fc_is_replayed_as_it_is_decoded(target):
    head = fitted_head(target, PROMPT, fc_norm=False, norm_before_fc=True)
    rounds = replay(recorded(target, head), **SETTINGS[2])
    assert (rounds.verifications, rounds.accepted) == decoded(target, head, **SETTINGS[2])
    assert 0 < rounds.accepted[0] < rounds.verifications


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_replayed_setting_counts_what_decoding_with_it_counts(target, head, recording, setting):
    rounds = replay(recording, **setting)
    assert (rounds.verifications, rounds.accepted) == decoded(target, head, **setting)
    assert 0 < rounds.accepted[0] < rounds.verifications


def test_a_window_is_replayed_as_it_is_decoded(target, head, recording):
    window = 6
    narrow = recorded(target, head, draft_window=window)
    for setting in SETTINGS[3::3]:
        rounds = replay(narrow, **setting)
        assert (rounds.verifications, rounds.accepted) == decoded(target, head, draft_window=window, **setting)
    assert replay(narrow, **SETTINGS[3]) != replay(recording, **SETTINGS[3])  # the head attends further back


@pytest.mark.parametrize(("steps", "topk"), [(5, 1), (2, 4), (4, 3)])
def test_every_path_of_a_tree_has_the_place_that_the_drafter_gives_it(target, head, steps, topk):
    """Texts that follow each branch of the largest tree; the target's answer keeps to a few of them."""
    speculator, capture, root = Speculator(target, head, LAYERS), Capture(target, LAYERS), 7
    aux = capture(torch.tensor([PROMPT]), [len(PROMPT)])[0].aux_hidden_states
    drafter = Drafter(head, target.embedding, room=len(PROMPT))
    with torch.inference_mode():
        hidden = drafter.confirm(aux, [*PROMPT[1:], root])
        trees = {
            drafts: drafter.tree(hidden, steps=steps, topk=topk, num_drafts=drafts).branches()
            for drafts in range(1, topk + (steps - 1) * topk**2 + 1)
        }
    for path in trees[max(trees)]:
        text = [*PROMPT, root, *path, *[0] * (steps - len(path))]
        [places] = batched_trees.BatchedTrees(speculator, capture, text).places(
            range(len(PROMPT), len(PROMPT) + 1), topk, steps
        )
        for drafts, paths in trees.items():
            nodes = {tuple(other[:depth]) for other in paths for depth in range(1, len(other) + 1)}
            found = [depth for depth in range(1, len(path) + 1) if places[steps - 1, depth - 1] < drafts]
            assert found == [depth for depth in range(1, len(path) + 1) if tuple(path[:depth]) in nodes]


@pytest.mark.shapes
def test_what_a_setting_gains_has_its_error_over_prompts(target, head, recording):
    setting = Shape(**SETTINGS[7])
    each = recording.replay_each(**SETTINGS[7])

    def accept_length(some):
        return 1 + sum(sum(rounds.gained) for rounds in some) / sum(rounds.verifications for rounds in some)

    expected = leave_one_out_error(accept_length, each)
    [gain] = replayed_gains(recording, [setting]).values()
    assert gain.accept_length == accept_length(each)
    assert gain.standard_error == pytest.approx(expected) and expected > 0
    assert replayed_gains(recorded(target, head, prompts=PROMPTS[:1]), [setting])[setting].standard_error is None


def test_settings_differ_in_what_they_gain(recording):
    gains = [sum(rounds.accepted) / rounds.verifications for rounds in (replay(recording, **one) for one in SETTINGS)]
    assert max(gains) > 1.5 * min(gains) and len(set(gains)) > 5


def test_the_tokens_of_the_rounds_are_those_behind_the_first_of_each_answer(target, recording):
    answers = [plain_greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert replay(recording, **SETTINGS[0]).tokens == sum(len(answer) - 1 for answer in answers)


def test_answers_that_stop_count_the_drafts_behind_their_end(target, head, monkeypatch):
    monkeypatch.setattr(
        batched_trees, "POSITIONS_AT_ONCE", 5
    )  # answers fall into several parts, the last of them short
    whole = plain_greedy(target, PROMPT, NEW_TOKENS)
    behind = 0
    for token in [*dict.fromkeys(whole)][::3]:
        stopping = replace(target)
        stopping.__dict__["stop_ids"] = target.stop_ids | {token}
        recording = recorded(stopping, head, prompts=[PROMPT])
        for setting in (SETTINGS[2], SETTINGS[8]):
            rounds = replay(recording, **setting)
            assert (rounds.verifications, rounds.accepted) == decoded(stopping, head, prompts=[PROMPT], **setting)
            behind += rounds.verifications + sum(rounds.accepted) - rounds.tokens
    assert behind > 0


def test_sampled_answers_are_replayed_too(target, head):
    """What the last round accepts behind their end as well: the seed goes on where it was."""
    sampled = {"temperature": 0.5, "seed": 7}
    for number, limit in enumerate((NEW_TOKENS, NEW_TOKENS - 5, 2)):
        recording = recorded(target, head, **sampled, max_new_tokens=limit)
        for setting in SETTINGS[number::3]:
            rounds = replay(recording, **setting)
            same = decoded(target, head, **sampled, **setting, max_new_tokens=limit)
            assert (rounds.verifications, rounds.accepted) == same


def test_the_shortest_answers_and_prompts_are_replayed(target, head):
    rounds = replay(recorded(target, head, max_new_tokens=1), steps=3, topk=2, draft_tokens=6)
    assert (rounds.verifications, rounds.accepted, rounds.tokens) == (0, [0, 0, 0], 0)
    assert replay(recorded(target, head, prompts=[]), steps=1, topk=1, draft_tokens=2).verifications == 0
    for prompts in ([PROMPT[:1]], [PROMPT[:2]]):
        rounds = replay(recorded(target, head, prompts=prompts), **SETTINGS[8])
        assert (rounds.verifications, rounds.accepted) == decoded(target, head, prompts=prompts, **SETTINGS[8])


def test_of_equal_scores_the_earlier_candidate_comes_first():
    scores = torch.tensor([[0.5, 0.25, 0.25, 0.25]])
    places = batched_trees._places_in_order(scores, torch.tensor([[0, 2, NOWHERE]]), [2, 4])
    assert places.tolist() == [[[0, 2, 2], [0, 2, 4]]]


def test_outputs_before_the_first_draft_are_those_of_a_plain_reference() -> None:
    target = small_target()
    head = fitted_head(target, PROMPT)
    capture = Capture(target, LAYERS)
    aux = capture(torch.tensor([PROMPT]), [len(PROMPT)])[0].aux_hidden_states
    trees = batched_trees.BatchedTrees(Speculator(target, head, LAYERS), capture, PROMPT)
    rows = trees.first_outputs(range(1, len(PROMPT)))
    for row in (0, 7, len(PROMPT) - 2):
        torch.testing.assert_close(rows[row], chain_output(head, target, aux, PROMPT[: row + 2], row))
    assert len(trees.first_outputs(range(1, 1))) == 0
