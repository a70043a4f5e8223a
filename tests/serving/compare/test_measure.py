"""The batched decoder measures what decoding prompt by prompt does, count by count."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from exported_head import tiny_target
from fitted_head import LAYERS, NEW_TOKENS, PROMPT, fitted_head, small_target, stopping_at

from eagle3.decoding.speculate import Speculator, measure, plain_greedy
from eagle3.serving.compare.measure import Answers, BatchedDecoder, all_ways
from eagle3.settings.serving import CompareSettings
from eagle3.settings.types import validated

SHAPES = [
    {"steps": 3, "topk": 1, "draft_tokens": None},
    {"steps": 7, "topk": 1, "draft_tokens": None},
    {"steps": 3, "topk": 3, "draft_tokens": 9},
]
# Ragged, and not sorted; two of them alike, whose samples must differ all the same.
PROMPTS = [PROMPT, PROMPT[9:], PROMPT * 2, PROMPT[:1], PROMPT[4:], PROMPT]


def settings(**changes):
    given = {"shapes": SHAPES, "temperatures": [0.0, 0.7], "batch_size": 3, "batch_tokens": 999}
    return validated(CompareSettings, given | {"positions": None, "draft_window": None} | changes)


def both(target, head, answers, window=None):
    """What the batched decoder gives for each way, and the measurement that decodes prompt by prompt."""
    how = replace(settings(), draft_window=window)
    ways = all_ways(how)
    batched = BatchedDecoder(target, how, answers)(Speculator(target, head, LAYERS), ways, "head")
    one_by_one = {
        way: measure(
            target, head, LAYERS, answers.prompts, **way.shape._asdict(), max_new_tokens=answers.max_new_tokens,
            temperature=way.temperature, seed=answers.seed, progress=None, draft_window=window,
        )
        for way in ways
    }  # fmt: skip
    return batched, one_by_one


def require_same(batched, one_by_one):
    assert batched.keys() == one_by_one.keys() and len(batched) == 6
    for way, found in batched.items():
        decoded = one_by_one[way].decoded
        accepted = np.array([sum(each.accepted) for each in decoded])
        behind_stop = np.array([each.behind_stop for each in decoded])
        for gains, expected in ((found.gains, accepted), (found.kept, accepted - behind_stop)):
            np.testing.assert_array_equal(gains.accepted, expected)
            np.testing.assert_array_equal(gains.verifications, [each.verifications for each in decoded])


def stopping(target):
    """The same target, which ends its turn at tokens that it says early to some of the prompts and late to others."""
    said = [plain_greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    return stopping_at(target, said[0][9], said[2][4])


@pytest.mark.parametrize(("stops", "window"), [(False, None), (True, None), (False, 6)])
def test_a_fitted_head_gains_the_same_on_every_prompt(stops, window):
    target = stopping(small_target()) if stops else small_target()
    most = NEW_TOKENS if stops else NEW_TOKENS // 2
    batched, one_by_one = both(target, fitted_head(small_target(), PROMPT), Answers(PROMPTS, most, 5), window)
    require_same(batched, one_by_one)
    greedy = [way for way in one_by_one if way.temperature == 0]
    assert {one_by_one[way].lossless for way in greedy} == {1.0} and len(greedy) == len(SHAPES)
    some = batched[greedy[0]]
    assert 0 < some.gains.accepted.sum() < 3 * some.gains.verifications.sum()
    behind = sum((found.gains.accepted - found.kept.accepted).sum() for found in batched.values())
    assert (behind > 0) == stops


@pytest.mark.shapes
@pytest.mark.slow
def test_a_random_head_gains_the_same_in_float32_on_the_bundled_target():
    target = tiny_target()
    assert target.embedding.dtype == torch.float32
    head = fitted_head(target, PROMPT)
    generator = torch.Generator().manual_seed(0)
    head.lm_head.weight.data += 0.3 * torch.randn(head.lm_head.weight.shape, generator=generator)
    batched, one_by_one = both(target, head, Answers(PROMPTS, NEW_TOKENS // 2, 0))
    require_same(batched, one_by_one)
    assert sum(found.gains.accepted.sum() for found in batched.values()) > 0


def test_rounds_are_counted_where_the_text_has_so_many_tokens_when_they_begin():
    target = stopping(small_target())
    speculator = Speculator(target, fitted_head(small_target(), PROMPT), LAYERS)
    chosen = settings(positions=[14, 30], temperatures=[0.0])
    found = BatchedDecoder(target, chosen, Answers(PROMPTS, NEW_TOKENS, 5))(speculator, all_ways(chosen), "head")
    spans = {"below 14": range(14), "14 to 29": range(14, 30), "30 and more": range(30, 999)}
    for way, measured in found.items():
        assert list(measured.by_position) == list(spans)
        for place, prompt in enumerate(PROMPTS):
            seen = []
            decoded = speculator.decode(prompt, max_new_tokens=NEW_TOKENS, watch=seen.append, **way.shape._asdict())
            length, rounds = len(prompt) + 1, []  # of each the length of the text, drafts accepted, and those behind
            for one in seen:
                rounds.append((length, len(one.accepted), decoded.behind_stop if one is seen[-1] else 0))
                length += len(one.chosen)
            for name, span in spans.items():
                of_span, inside = measured.by_position[name], [each for each in rounds if each[0] in span]
                assert of_span.gains.verifications[place] == of_span.kept.verifications[place] == len(inside)
                assert of_span.gains.accepted[place] == sum(gained for _, gained, _ in inside)
                assert of_span.kept.accepted[place] == sum(gained - behind for _, gained, behind in inside)
        assert all(each.gains.verifications.any() for each in measured.by_position.values())
