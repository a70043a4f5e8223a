"""Which rows are trained at which step, against the sentence that defines it."""

from itertools import pairwise

import pytest
import torch

from eagle3.features.turns import teacher_positions, tokens_left_in_turn
from eagle3.head.anchors import anchors_and_steps, runs

PATTERNS = [
    [0, 0, 1, 1, 1, 0],
    [0, 1, 1, 0, 0, 2, 2, 2, 2],
    [1, 1, 1, 0],
    [0, 1],
    [0, 1, 0, 2, 2],
    [0, 0, 0],
    [1, 1, 2, 2, 2],
    [1] * 9,
]


def by_definition(turns: list[int], ttt_steps: int) -> dict[int, int]:
    """Row t is trained at step k iff x_{t+1} … x_{t+2+k} all are answer tokens of the same turn."""
    depth = {}
    for row in range(len(turns)):
        steps = 0
        for step in range(ttt_steps):
            needed = turns[row + 1 : row + 3 + step]
            if len(needed) < 2 + step or needed[0] == 0 or len(set(needed)) > 1:
                break
            steps += 1
        if steps:
            depth[row] = steps
    return depth


@pytest.mark.parametrize("turns", PATTERNS)
@pytest.mark.parametrize("ttt_steps", [1, 2, 7])
def test_trained_rows_are_those_of_the_definition(turns: list[int], ttt_steps: int) -> None:
    rows, depth = anchors_and_steps(torch.tensor(turns), ttt_steps)
    assert dict(zip(rows.tolist(), depth.tolist(), strict=True)) == by_definition(turns, ttt_steps)


def test_random_turns_follow_the_definition_too() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        runs = torch.randint(0, 5, (8,), generator=generator).tolist()
        turns = [number if number % 2 else 0 for number, run in enumerate(runs) for _ in range(run)]
        if turns:
            rows, depth = anchors_and_steps(torch.tensor(turns), 4)
            assert dict(zip(rows.tolist(), depth.tolist(), strict=True)) == by_definition(turns, 4)


def test_the_row_at_the_last_prompt_token_is_trained_and_none_before_it() -> None:
    rows, _ = anchors_and_steps(torch.tensor([0, 0, 0, 1, 1, 1]), 7)
    assert rows.tolist() == [2, 3]


def test_one_token_answers_and_empty_answers_train_nothing() -> None:
    assert len(anchors_and_steps(torch.tensor([0, 0, 1, 0]), 7)[0]) == 0
    assert len(anchors_and_steps(torch.tensor([0, 0, 0]), 7)[0]) == 0


@pytest.mark.parametrize("turns", PATTERNS)
def test_every_step_of_every_row_finds_its_teacher_stored(turns: list[int]) -> None:
    stored = teacher_positions(torch.tensor(turns))
    rows, depth = anchors_and_steps(torch.tensor(turns), 7)
    asked = {row + 1 + step for row, steps in zip(rows.tolist(), depth.tolist(), strict=True) for step in range(steps)}
    assert asked <= set(stored.nonzero().squeeze(1).tolist())


def test_tokens_left_in_turn_counts_down_inside_each_turn() -> None:
    assert tokens_left_in_turn(torch.tensor([0, 1, 1, 2, 0, 3, 3, 3])).tolist() == [0, 2, 1, 1, 0, 3, 2, 1]


@pytest.mark.parametrize("turns", PATTERNS)
def test_each_run_of_trained_rows_is_that_of_one_turn(turns: list[int]) -> None:
    rows, _ = anchors_and_steps(torch.tensor(turns), 7)
    bounds, ends = runs(rows)
    by_run = [rows[first:stop].tolist() for first, stop in pairwise(bounds)]
    predicted = torch.tensor(turns)[rows + 1].tolist()
    assert by_run == [
        [row for row, of in zip(rows.tolist(), predicted, strict=True) if of == turn] for turn in sorted(set(predicted))
    ]
    assert list(ends) == [run[-1] + 1 for run in by_run]
