"""Loss masks: which tokens stay."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eagle3.errors import InputError
from eagle3.features.loss_mask import AllTurns, Everything, LastTurn, WithoutReasoning
from eagle3.features.sample import Sample

TURNS = [0, 1, 1, 1, 0, 2, 2, 2, 2, 2]


def test_all_turns_changes_nothing(make_sample: Callable[..., Sample]) -> None:
    assert AllTurns()(make_sample(TURNS)).tolist() == TURNS


def test_last_turn_keeps_the_last_answer(make_sample: Callable[..., Sample]) -> None:
    assert LastTurn()(make_sample(TURNS)).tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([9, 9, 9, 9, 9, 7, 9, 8, 9, 9], [0, 1, 1, 1, 0, 0, 0, 0, 2, 2]),
        ([9, 9, 9, 9, 7, 9, 8, 9, 9, 9], [0, 1, 1, 1, 0, 0, 0, 2, 2, 2]),  # opened by the prompt
        ([9, 9, 9, 9, 9, 7, 9, 9, 9, 9], [0, 1, 1, 1, 0, 0, 0, 0, 0, 0]),  # never closed
        ([9, 7, 8, 9, 9, 9, 7, 9, 8, 9], [0, 0, 0, 1, 0, 2, 0, 0, 0, 2]),
        ([9] * 10, TURNS),
    ],
)
def test_without_reasoning_leaves_out_the_spans_between_the_markers(
    make_sample: Callable[..., Sample], tokens: list[int], kept: list[int]
) -> None:
    mask = WithoutReasoning()
    mask.check({"reasoning_ids": [[7], [8]]})
    assert mask(replace(make_sample(TURNS), input_ids=torch.tensor(tokens))).tolist() == kept


def test_markers_of_several_tokens_are_found(make_sample: Callable[..., Sample]) -> None:
    mask = WithoutReasoning()
    mask.check({"reasoning_ids": [[7, 6], [8, 6]]})
    sample = replace(make_sample(TURNS), input_ids=torch.tensor([9, 7, 6, 9, 9, 7, 9, 8, 6, 9]))
    assert mask(sample).tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 2]


def test_everything_trains_prompts_where_the_store_has_their_teacher(make_sample: Callable[..., Sample]) -> None:
    Everything().check({"teacher_rows": "all"})
    assert Everything()(make_sample(TURNS, stored="all")).tolist() == [1] * len(TURNS)


@pytest.mark.parametrize(
    ("mask", "made_from", "message"),
    [
        (WithoutReasoning(), {"reasoning_ids": None}, r"loss_mask=without_reasoning .* features\.reasoning"),
        (Everything(), {"teacher_rows": "answers"}, r"loss_mask=everything .* features\.teacher_rows=all"),
    ],
)
def test_a_store_that_cannot_serve_a_mask_is_refused_with_the_way_out(
    mask: AllTurns, made_from: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        mask.check(made_from)
