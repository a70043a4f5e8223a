"""Speculative decoding: lossless, cut where it must be, sampled by the target's law, and every count adds up."""

from itertools import pairwise

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
from transformers import LlamaConfig

from eagle3.answers.generate import generate
from eagle3.decoding import speculate
from eagle3.decoding.speculate import Speculator, measure, plain_greedy
from eagle3.decoding.verifier import Verifier
from eagle3.errors import InputError
from eagle3.target.capture import Capture


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def head(target):
    return fitted_head(target, PROMPT)


@pytest.fixture
def rounds(monkeypatch):
    """What each verification was given and answered: (paths, accepted drafts and the target's next token)."""
    seen = []
    advance = Verifier.advance

    def recording(verifier, known, paths):
        chosen = advance(verifier, known, paths)
        seen.append((paths, chosen))
        return chosen

    monkeypatch.setattr(Verifier, "advance", recording)
    return seen


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_every_round_drafts_behind_what_the_round_before_confirmed(target, head, rounds, shape):
    Speculator(target, head, LAYERS).decode(PROMPT, max_new_tokens=NEW_TOKENS, **shape)
    settings = {"topk": 1, "draft_tokens": shape["steps"] + 1, **shape}
    ids = list(PROMPT)
    assert rounds[0][0] == [[]] and len(rounds) > 3
    for (_, chosen), (paths, _) in pairwise(rounds):
        ids += chosen
        assert {tuple(path) for path in paths} == reference_paths(head, target, ids, **settings)


def test_no_some_and_all_drafts_are_accepted_and_every_count_adds_up(target, head, rounds):
    decoded = Speculator(target, head, LAYERS).decode(PROMPT, max_new_tokens=NEW_TOKENS, **CHAIN)
    counts = [len(chosen) - 1 for _, chosen in rounds[1:]]
    assert {0, 3} < set(counts)
    assert decoded.verifications == len(counts)
    assert decoded.accepted == [sum(count >= depth for count in counts) for depth in (1, 2, 3)]
    # The first token is prefill's; the last round may have gone beyond the limit.
    made = 1 + decoded.verifications + sum(decoded.accepted)
    assert len(decoded.token_ids) == NEW_TOKENS <= made <= NEW_TOKENS + 3


def test_a_tree_accepts_more_than_a_chain_of_its_depth(target, head):
    speculator = Speculator(target, head, LAYERS)
    chain, tree = (speculator.decode(PROMPT, max_new_tokens=NEW_TOKENS, **shape) for shape in (CHAIN, TREE))
    assert tree.token_ids == chain.token_ids
    assert tree.verifications < chain.verifications


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_the_answer_ends_with_a_stop_token_wherever_in_a_round_it_comes(target, head, rounds, shape):
    whole = plain_greedy(target, PROMPT, NEW_TOKENS)
    within_accepted = False
    for token in [*dict.fromkeys(whole)][::2]:
        rounds.clear()
        stopping = stopping_at(target, token)
        decoded = Speculator(stopping, head, LAYERS).decode(PROMPT, max_new_tokens=NEW_TOKENS, **shape)
        assert decoded.token_ids == whole[: whole.index(token) + 1] == plain_greedy(stopping, PROMPT, NEW_TOKENS)
        assert decoded.finish_reason == "stop"
        drafted = [chosen for paths, chosen in rounds if paths != [[]]]
        within_accepted |= bool(drafted) and token in drafted[-1][:-1]
        assert sum(decoded.accepted) == sum(len(chosen) - 1 for chosen in drafted)  # those behind the stop count too
        made = 1 + sum(len(chosen) for chosen in drafted)  # the first is prefill's
        assert decoded.behind_stop == made - len(decoded.token_ids)
    assert within_accepted


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_the_answer_is_cut_at_every_length(target, head, shape):
    whole = plain_greedy(target, PROMPT, NEW_TOKENS)
    for limit in range(1, NEW_TOKENS // 2):
        decoded = Speculator(target, head, LAYERS).decode(PROMPT, max_new_tokens=limit, **shape)
        assert (decoded.token_ids, decoded.finish_reason) == (whole[:limit], "length")
        assert decoded.verifications < limit


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_a_sampled_answer_is_the_targets_own_for_the_same_seed(target, head, shape):
    speculator = Speculator(target, head, LAYERS)
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.5}
    decoded = [speculator.decode(PROMPT, seed=seed, **sampling, **shape) for seed in range(4)]
    own = generate(
        target.model,
        [PROMPT] * 4,
        seeds=[*range(4)],
        top_p=1.0,
        top_k=0,
        stop_ids=target.stop_ids,
        pad_id=0,
        **sampling,
    )
    assert [(one.token_ids, one.finish_reason) for one in decoded] == [
        (one.token_ids, one.finish_reason) for one in own
    ]
    assert len({tuple(one.token_ids) for one in decoded}) == 4 and sum(sum(one.accepted) for one in decoded) > 0


def test_sampled_tokens_follow_the_targets_distribution(target, head):
    """The second token, which the tree drafts: summed over all first tokens, in six groups of about equal weight."""
    with torch.inference_mode():
        first = target.model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
        branches = torch.tensor([[*PROMPT, token] for token in range(50)])
        second = target.model(branches).logits[:, -1].softmax(-1)
        going_on = first.clone()
        going_on[list(target.stop_ids)] = 0
        expected = going_on @ second  # (V,), less than 1 together where the first token ended the answer
    groups = (expected.cumsum(0) / expected.sum() * 6).ceil().clamp(max=6).long() - 1
    speculator, samples = Speculator(target, head, LAYERS), 500
    answers = [
        speculator.decode(PROMPT, max_new_tokens=2, temperature=1.0, seed=seed, **TREE) for seed in range(samples)
    ]
    seen = torch.zeros(6).double()
    for answer in answers:
        if len(answer.token_ids) == 2:
            seen[groups[answer.token_ids[1]]] += 1
    wanted = torch.zeros(6).double().index_add(0, groups, expected) * samples
    assert min(wanted) > 20
    assert ((seen - wanted) ** 2 / wanted).sum() < 22.5  # chi-square, 6 degrees of freedom: exceeded in 1 of 1000 tests
    accepted = sum(answer.accepted[0] for answer in answers)
    assert 0.05 * samples < accepted < 0.95 * samples


def test_measure_reports_sglangs_accept_length_and_what_is_not_lossless(target, head, monkeypatch):
    prompts = [PROMPT, PROMPT[4:], PROMPT[9:]]
    settings = {"max_new_tokens": NEW_TOKENS, "seed": 0, "progress": None, "draft_tokens": None, "topk": 1, **CHAIN}
    plain = [plain_greedy(target, prompt, NEW_TOKENS) for prompt in prompts]
    measured = measure(target, head, LAYERS, prompts, temperature=0.0, **settings)
    accepted = sum(sum(one.accepted) for one in measured.decoded)
    verifications = sum(one.verifications for one in measured.decoded)
    assert measured.accept_length == pytest.approx(1 + accepted / verifications)
    assert measured.per_depth[0] == sum(one.accepted[0] for one in measured.decoded) / verifications
    assert 1 > measured.per_depth[0] >= measured.per_depth[1] >= measured.per_depth[2] > 0
    assert measured.accept_length_kept == measured.accept_length  # no answer stopped
    assert measured.lossless == 1.0 and measured.tokens == sum(map(len, plain)) and measured.seconds > 0
    assert measure(target, head, LAYERS, prompts, temperature=1.0, **settings).lossless is None
    wrong = iter([plain[0], plain[1], plain[0]])
    monkeypatch.setattr(speculate, "plain_greedy", lambda *_: next(wrong))
    assert measure(target, head, LAYERS, prompts, temperature=0.0, **settings).lossless == 2 / 3


def test_the_kept_accept_length_is_the_tokens_of_stopped_answers_over_verifications(target, head):
    settings = {"max_new_tokens": NEW_TOKENS, "seed": 0, "progress": None, "draft_tokens": None, "topk": 1, **CHAIN}
    whole = plain_greedy(target, PROMPT, NEW_TOKENS)
    behind = 0
    for token in [*dict.fromkeys(whole[1:])][::3]:
        measured = measure(stopping_at(target, token), head, LAYERS, [PROMPT], temperature=0.0, **settings)
        [decoded] = measured.decoded
        tokens = len(decoded.token_ids) - 1  # without prefill's
        assert measured.accept_length_kept == pytest.approx(tokens / decoded.verifications)
        behind += decoded.behind_stop
    assert behind > 0


def test_nothing_to_verify_is_refused(target, head):
    settings = {"max_new_tokens": 1, "seed": 0, "progress": None, "draft_tokens": None, "topk": 1, "steps": 3}
    measured = measure(target, head, LAYERS, [PROMPT], temperature=0.0, **settings)
    with pytest.raises(InputError, match="none of 1 answers was longer than one token"):
        _ = measured.accept_length


@pytest.mark.parametrize(
    ("shape", "way_out"),
    [
        ({"steps": 3, "draft_tokens": 9}, "set draft_tokens=4 or null"),
        ({"steps": 3, "topk": 2}, "from 2 to 11 tokens"),
        ({"steps": 3, "topk": 2, "draft_tokens": 12}, "from 2 to 11 tokens"),
        ({"steps": 3, "topk": 2, "draft_tokens": 1}, "from 2 to 11 tokens"),
    ],
)
def test_bad_shapes_of_a_draft_name_their_keys(target, head, shape, way_out):
    given = rf"steps={shape['steps']} topk={shape.get('topk', 1)} draft_tokens={shape.get('draft_tokens')}: .*{way_out}"
    with pytest.raises(InputError, match=given):
        Speculator(target, head, LAYERS).decode(PROMPT, max_new_tokens=4, **shape)


def test_more_children_than_the_head_can_draft_are_refused(target, head):
    with pytest.raises(InputError, match="topk=1000: the head can draft no more than its"):
        Speculator(target, head, LAYERS).decode(PROMPT, max_new_tokens=4, steps=3, topk=1000, draft_tokens=9)


def test_a_head_of_another_target_is_refused(target, head):
    other = make_target(LlamaConfig(**{**SMALL.to_dict(), "hidden_size": 16}))
    with pytest.raises(InputError, match=r"target\.path=random has hidden size 16"):
        Speculator(other, head, LAYERS)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_who_watches_sees_every_round_and_changes_nothing(target, head, rounds, shape):
    speculator, seen = Speculator(target, head, LAYERS), []
    decoded = speculator.decode(PROMPT, max_new_tokens=NEW_TOKENS, watch=seen.append, **shape)
    assert decoded == speculator.decode(PROMPT, max_new_tokens=NEW_TOKENS, **shape)
    known = [*PROMPT, rounds[0][1][0]]
    settings = {"topk": 1, "draft_tokens": shape["steps"] + 1, **shape}
    assert len(seen) == decoded.verifications
    for watched, (paths, chosen) in zip(seen, rounds[1:], strict=False):
        tree = watched.drafts
        nodes = [tree.walk(path) for path in paths]
        assert [[tree.tokens[node] for node in path] for path in nodes] == paths
        assert {node for path in nodes for node in path} == {*range(settings["draft_tokens"] - 1)}
        for path in nodes:
            assert [tree.parents[node] for node in path] == [-1, *path[:-1]]
            assert [tree.probability(node) for node in path] == pytest.approx(
                [probability_of(head, target, known, tree, node) for node in path]
            )
        assert watched.chosen == chosen
        assert [tree.tokens[node] for node in watched.accepted] == chosen[:-1]
        known += chosen
    assert [sum(len(each.accepted) >= depth for each in seen) for depth in (1, 2, 3)] == decoded.accepted


def probability_of(head, target, known, tree, node):
    """What the head gives a draft behind its parent, without any cache."""
    path, above = [], tree.parents[node]
    while above != -1:
        path, above = [tree.tokens[above], *path], tree.parents[above]
    aux = Capture(target, LAYERS)(torch.tensor([known[:-1]]), [len(known) - 1])[0].aux_hidden_states
    output = chain_output(head, target, aux, [*known, *path], len(known) - 2)
    return float(head.logits(output).softmax(-1)[head.draft_ids.tolist().index(tree.tokens[node])])
