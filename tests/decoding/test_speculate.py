"""Speculative decoding: drafts as a reference without any cache, lossless, cut where it must be, every count right."""

import pytest
import torch
from fitted_head import (
    CHAIN,
    LAYERS,
    NEW_TOKENS,
    PROMPT,
    SMALL,
    TREE,
    chain_output,
    fitted_head,
    make_target,
    reference_paths,
    small_target,
    stopping_at,
)
from pairs import all_pairs
from transformers import LlamaConfig

from eagle3.answers.generate import generate
from eagle3.decoding import speculate
from eagle3.decoding.drafter import Tree
from eagle3.decoding.speculate import Speculator, measure, plain_greedy
from eagle3.errors import InputError
from eagle3.target.capture import Capture

MEASURED = {"max_new_tokens": NEW_TOKENS, "seed": 0, "progress": None, "draft_tokens": None, "topk": 1, **CHAIN}
SHAPES = [CHAIN, TREE, {"steps": 1, "topk": 3, "draft_tokens": 4}]
HEADS = {
    "fc_norm": {},
    "norm_output": {"norm_output": True, "fc_norm": False},
    "norm_before_fc": {"norm_before_fc": True, "fc_norm": False},
    "norm_before_residual": {"norm_before_residual": True},
}


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def heads(target):
    return {name: fitted_head(target, PROMPT, **changes) for name, changes in HEADS.items()}


@pytest.fixture(scope="module")
def head(heads):
    return heads["fc_norm"]


def watched(target, head, **settings):
    """An answer and the rounds that made it."""
    seen = []
    given = {"max_new_tokens": NEW_TOKENS} | settings
    return Speculator(target, head, LAYERS).decode(PROMPT, watch=seen.append, **given), seen


@all_pairs(shape=SHAPES, window=[None, 6], name=[*HEADS])
def test_every_round_drafts_what_a_reference_drafts_behind_what_the_round_before_confirmed(
    target, heads, shape, window, name
):
    head = heads[name]
    decoded, seen = watched(target, head, draft_window=window, **shape)
    settings = {"topk": 1, "draft_tokens": shape["steps"] + 1, **shape}
    known = [*PROMPT, decoded.token_ids[0]]
    assert len(seen) == decoded.verifications > 3
    for each in seen:
        tree, paths = each.drafts, each.drafts.paths()
        assert len({tuple(path) for path in paths}) == len(paths) == settings["draft_tokens"] - 1
        assert {tuple(path) for path in tree.branches()} == reference_paths(
            head, target, known, window=window, **settings
        )
        assert [paths[node] for node in each.accepted] == [each.chosen[:depth] for depth in range(1, len(each.chosen))]
        known += each.chosen


def test_a_draft_has_the_heads_probability_behind_its_parent(target, head):
    decoded, seen = watched(target, head, **TREE)
    known, draft_ids = [*PROMPT, decoded.token_ids[0]], head.draft_ids.tolist()
    for each in seen[:3]:
        aux = Capture(target, LAYERS)(torch.tensor([known[:-1]]), [len(known) - 1])[0].aux_hidden_states
        for node, (*above, token) in enumerate(each.drafts.paths()):
            output = chain_output(head, target, aux, [*known, *above], len(known) - 2)
            expected = float(head.logits(output).softmax(-1)[draft_ids.index(token)])
            assert each.drafts.probability(node) == pytest.approx(expected)
        known += each.chosen
    assert Tree([1, 2, 3], [-1, 0, 1], [1e-30, 0.0, 0.0]).probability(2) == 0.0  # of an unlikely path


def test_no_some_and_all_drafts_are_accepted_and_every_count_adds_up(target, head):
    decoded, seen = watched(target, head, **CHAIN)
    counts = [len(each.accepted) for each in seen]
    assert {0, 3} < set(counts)
    assert decoded.verifications == len(counts)
    assert decoded.accepted == [sum(count >= depth for count in counts) for depth in (1, 2, 3)]
    # The first token is prefill's; the last round may have gone beyond the limit.
    made = 1 + decoded.verifications + sum(decoded.accepted)
    assert len(decoded.token_ids) == NEW_TOKENS <= made <= NEW_TOKENS + 3
    tree, _ = watched(target, head, **TREE)
    assert tree.token_ids == decoded.token_ids and tree.verifications < decoded.verifications


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_the_answer_ends_with_a_stop_token_wherever_in_a_round_it_comes(target, head, shape):
    whole = plain_greedy(target, PROMPT, NEW_TOKENS)
    within_accepted = False
    for token in [*dict.fromkeys(whole)][::3]:
        stopping = stopping_at(target, token)
        decoded, seen = watched(stopping, head, **shape)
        assert decoded.token_ids == whole[: whole.index(token) + 1] == plain_greedy(stopping, PROMPT, NEW_TOKENS)
        assert decoded.finish_reason == "stop"
        within_accepted |= bool(seen) and token in seen[-1].chosen[:-1]
        assert sum(decoded.accepted) == sum(len(each.accepted) for each in seen)  # those behind the stop count too
        made = 1 + sum(len(each.chosen) for each in seen)  # the first is prefill's
        assert decoded.behind_stop == made - len(decoded.token_ids)
    assert within_accepted


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_the_answer_is_cut_at_every_length(target, head, shape):
    whole = plain_greedy(target, PROMPT, NEW_TOKENS)
    for limit in range(1, NEW_TOKENS // 2):
        decoded, _ = watched(target, head, max_new_tokens=limit, **shape)
        assert (decoded.token_ids, decoded.finish_reason) == (whole[:limit], "length")
        assert decoded.verifications < limit


@pytest.mark.parametrize(
    ("shape", "limits"), [(CHAIN, {"top_p": 1.0, "top_k": 0}), (TREE, {"top_p": 0.9, "top_k": 6})], ids=str
)
def test_a_sampled_answer_is_the_targets_own_for_the_same_seed(target, head, shape, limits):
    """`generate` draws from the target's distribution (tests/answers/test_generate.py), so decoding does, too."""
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.5, **limits}
    decoded = [watched(target, head, seed=seed, **sampling, **shape)[0] for seed in range(3)]
    options = {"stop_ids": target.stop_ids, "pad_id": 0}
    own = generate(target.model, [PROMPT] * 3, seeds=[*range(3)], **options, **sampling)
    assert [(one.token_ids, one.finish_reason) for one in decoded] == [
        (one.token_ids, one.finish_reason) for one in own
    ]
    assert len({tuple(one.token_ids) for one in decoded}) == 3 and sum(sum(one.accepted) for one in decoded) > 0


def test_measure_reports_sglangs_accept_length_and_what_is_not_lossless(target, head, monkeypatch):
    prompts = [PROMPT, PROMPT[4:], PROMPT[9:]]
    plain = [plain_greedy(target, prompt, NEW_TOKENS) for prompt in prompts]
    measured = measure(target, head, LAYERS, prompts, temperature=0.0, **MEASURED)
    accepted = sum(sum(one.accepted) for one in measured.decoded)
    verifications = sum(one.verifications for one in measured.decoded)
    assert measured.accept_length == pytest.approx(1 + accepted / verifications)
    assert measured.per_depth[0] == sum(one.accepted[0] for one in measured.decoded) / verifications
    assert 1 > measured.per_depth[0] >= measured.per_depth[1] >= measured.per_depth[2] > 0
    assert measured.accept_length_kept == measured.accept_length  # no answer stopped
    assert measured.lossless == 1.0 and measured.tokens == sum(map(len, plain)) and measured.seconds > 0
    for uncompared in ({"temperature": 1.0}, {"temperature": 0.0, "lossless": False}):
        assert measure(target, head, LAYERS, prompts[2:], **uncompared, **MEASURED).lossless is None
    wrong = iter([plain[0], plain[1], plain[0]])
    monkeypatch.setattr(speculate, "plain_greedy", lambda *_: next(wrong))
    assert measure(target, head, LAYERS, prompts, temperature=0.0, **MEASURED).lossless == 2 / 3


def test_the_kept_accept_length_is_the_tokens_of_stopped_answers_over_verifications(target, head):
    whole = plain_greedy(target, PROMPT, NEW_TOKENS)
    behind = 0
    for token in [*dict.fromkeys(whole[1:])][::4]:
        measured = measure(stopping_at(target, token), head, LAYERS, [PROMPT], temperature=0.0, **MEASURED)
        [decoded] = measured.decoded
        tokens = len(decoded.token_ids) - 1  # without prefill's
        assert measured.accept_length_kept == pytest.approx(tokens / decoded.verifications)
        behind += decoded.behind_stop
    assert behind > 0


def test_nothing_to_verify_is_refused(target, head):
    measured = measure(target, head, LAYERS, [PROMPT], temperature=0.0, **MEASURED | {"max_new_tokens": 1})
    with pytest.raises(InputError, match="none of 1 answers was longer than one token"):
        _ = measured.accept_length


def test_a_head_of_another_target_is_refused(head):
    other = make_target(LlamaConfig(**{**SMALL.to_dict(), "hidden_size": 16}))
    with pytest.raises(InputError, match=r"target\.path=random has hidden size 16"):
        Speculator(other, head, LAYERS)
