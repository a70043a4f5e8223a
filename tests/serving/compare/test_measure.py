"""Replaying heads on the target's answers measures what decoding prompt by prompt does, count by count."""

from dataclasses import asdict, replace

import pytest
from fitted_head import LAYERS, NEW_TOKENS, PROMPT, fitted_head, small_target, stopping_at
from serving_fixtures import serve_run

from eagle3.decoding.speculate import Speculator, plain_greedy
from eagle3.serving.compare.measure import answers_at, measure_head
from eagle3.settings.serving import CompareSettings
from eagle3.settings.types import validated

SHAPES = [{"steps": 5, "topk": 1, "draft_tokens": None}, {"steps": 3, "topk": 3, "draft_tokens": 9}]
# Ragged, and not sorted; two of them alike, whose samples must differ all the same.
PROMPTS = [PROMPT, PROMPT[9:], PROMPT * 2, PROMPT]
SEED = 5
SPANS = {"all": range(999), "below 14": range(14), "14 to 29": range(14, 30), "30 and more": range(30, 999)}
SETTINGS = validated(
    CompareSettings,
    {
        "shapes": SHAPES,
        "samplings": [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 4}],
        "batch_size": 3,
        "batch_tokens": 999,
        "positions": [14, 30],
    }
    | {"draft_window": None},
)


def require_same(target, head, settings, max_new_tokens):
    """Require the same counts as from decoding prompt by prompt, and return what was measured."""
    speculator = Speculator(target, head, LAYERS)
    run = replace(serve_run("compare"), compare=settings, max_new_tokens=max_new_tokens, seed=SEED)
    answers = answers_at(target, PROMPTS, run)
    measured = measure_head(speculator, answers, range(len(PROMPTS)), settings, "head")
    assert len(measured) == len(SHAPES) * 2
    for way, found in measured.items():
        assert list(found) == list(SPANS)
        for place, prompt in enumerate(PROMPTS):
            seen = []
            decoded = speculator.decode(
                prompt, **way.shape._asdict(), max_new_tokens=max_new_tokens, **asdict(way.sampling),
                seed=SEED + place, draft_window=settings.draft_window, watch=seen.append,
            )  # fmt: skip
            length, rounds = len(prompt) + 1, []  # of each the length of the text, drafts accepted, and those behind
            for one in seen:
                rounds.append((length, len(one.accepted), decoded.behind_stop if one is seen[-1] else 0))
                length += len(one.chosen)
            for span, of_span in zip(SPANS.values(), found.values(), strict=True):
                inside = [each for each in rounds if each[0] in span]
                assert of_span.gains.verifications[place] == of_span.kept.verifications[place] == len(inside)
                assert of_span.gains.accepted[place] == sum(gained for _, gained, _ in inside)
                assert of_span.kept.accepted[place] == sum(gained - behind for _, gained, behind in inside)
    return measured


@pytest.mark.parametrize(("stops", "window"), [(True, None), (False, 6)])
def test_a_fitted_head_gains_the_same_on_every_prompt(stops, window):
    target = small_target()
    if stops:  # tokens that it says early to some of the prompts and late to others
        said = [plain_greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
        target = stopping_at(target, said[0][9], said[2][4])
    head, most = fitted_head(small_target(), PROMPT), NEW_TOKENS if stops else NEW_TOKENS // 2
    measured = require_same(target, head, replace(SETTINGS, draft_window=window), most)
    some = next(iter(measured.values()))["all"]
    assert 0 < some.gains.accepted.sum() < 3 * some.gains.verifications.sum()
    behind = sum((found["all"].gains.accepted - found["all"].kept.accepted).sum() for found in measured.values())
    assert (behind > 0) == stops
