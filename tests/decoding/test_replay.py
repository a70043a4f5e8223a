"""What is replayed from one recording is, count by count, what decoding with each setting measures."""

from typing import NamedTuple

import pytest
import torch
from fitted_head import LAYERS, NEW_TOKENS, PROMPT, fitted_head, small_target, stopping_at

from eagle3.decoding import batched_trees
from eagle3.decoding.batched_trees import NOWHERE
from eagle3.decoding.replay import answer_all, record
from eagle3.decoding.speculate import Speculator, measure, plain_greedy

PROMPTS = [PROMPT, PROMPT[9:]]
CHAIN, TREE = {"steps": 5, "topk": 1, "draft_tokens": 6}, {"steps": 4, "topk": 3, "draft_tokens": 9}
SETTINGS = [
    CHAIN,
    TREE,
    {"steps": 1, "topk": 1, "draft_tokens": 2},
    {"steps": 1, "topk": 3, "draft_tokens": 4},
    {"steps": 3, "topk": 2, "draft_tokens": 11},
    {"steps": 5, "topk": 4, "draft_tokens": 32},
]
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
DECODING = {"max_new_tokens": NEW_TOKENS, **GREEDY, "seed": 0, "progress": None}


class All(NamedTuple):
    """The rounds of all answers, and the tokens of the answers after prefill's."""

    verifications: int
    accepted: list[int]
    tokens: int


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


def replay(recording, *, steps, **setting):
    each = recording.replay_each(steps=steps, **setting)
    gained = [gain for rounds in each for gain in rounds.gained]
    accepted = [sum(gain >= depth for gain in gained) for depth in range(1, steps + 1)]
    return All(len(gained), accepted, sum(rounds.tokens for rounds in each))


def decoded(target, head, prompts=PROMPTS, **settings):
    measured = measure(target, head, LAYERS, prompts, **DECODING | settings)
    accepted = [sum(depth) for depth in zip(*(answer.accepted for answer in measured.decoded), strict=True)]
    return All(measured.verifications, accepted, measured.tokens - len(prompts))


@pytest.fixture(scope="module")
def recording(target, head):
    return recorded(target, head)


def test_answers_in_batches_by_length_are_in_the_order_of_their_prompts(target):
    prompts = [PROMPT[:length] for length in (5, 2, 4, 3)]
    options = {**DECODING, "beyond": 2}
    together = answer_all(target, prompts, batch_size=2, **options)
    alone = [answer_all(target, [prompt], batch_size=1, **options)[0] for prompt in prompts]
    assert [each.prompt for each in together] == prompts and together == alone


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_replayed_setting_counts_what_decoding_with_it_counts(target, head, recording, setting):
    rounds = replay(recording, **setting)
    assert rounds == decoded(target, head, **setting)
    assert 0 < rounds.accepted[0] < rounds.verifications


def test_answers_that_stop_count_the_drafts_behind_their_end(target, head, monkeypatch):
    # Answers fall into several parts, the last of them short.
    monkeypatch.setattr(batched_trees, "POSITIONS_AT_ONCE", 5)
    whole = plain_greedy(target, PROMPT, NEW_TOKENS)
    behind = 0
    for token in [*dict.fromkeys(whole)][::4]:
        stopping = stopping_at(target, token)
        recording = recorded(stopping, head, prompts=[PROMPT])
        for setting in (CHAIN, TREE):
            rounds = replay(recording, **setting)
            assert rounds == decoded(stopping, head, prompts=[PROMPT], **setting)
            behind += rounds.verifications + sum(rounds.accepted) - rounds.tokens
    assert behind > 0


@pytest.mark.shapes
def test_the_shortest_answers_and_prompts_are_replayed(target, head):
    nothing = replay(recorded(target, head, max_new_tokens=1), steps=3, topk=2, draft_tokens=6)
    assert nothing == (0, [0, 0, 0], 0)
    assert replay(recorded(target, head, prompts=[]), steps=1, topk=1, draft_tokens=2).verifications == 0
    for prompts in ([PROMPT[:1]], [PROMPT[:2]]):
        rounds = replay(recorded(target, head, prompts=prompts), **TREE)
        assert rounds == decoded(target, head, prompts=prompts, **TREE)


def test_of_equal_scores_the_earlier_candidate_comes_first():
    scores = torch.tensor([[0.5, 0.25, 0.25, 0.25]])
    places = batched_trees._places_in_order(scores, torch.tensor([[0, 2, NOWHERE]]), [2, 4])
    assert places.tolist() == [[[0, 2, 2], [0, 2, 4]]]
