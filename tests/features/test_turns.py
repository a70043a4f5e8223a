"""Where answers lie, where a teacher is asked, and where drafts begin, against the sentences that say so."""

import pytest
import torch

from eagle3.features.turns import find_anchors, find_answer_spans, teacher_positions, tokens_left_in_turn

PATTERNS = [[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 2, 2], [1, 1, 2, 2, 2], [0, 1], [0, 0, 0, 1, 0, 0], [1] * 4, [0]]


@pytest.mark.parametrize("turns", PATTERNS)
def test_a_teacher_is_asked_where_a_token_and_the_next_are_of_one_answer_and_drafts_begin_one_before(turns):
    asked = [place for place in range(len(turns) - 1) if turns[place] > 0 and turns[place] == turns[place + 1]]
    assert teacher_positions(torch.tensor(turns)).nonzero().squeeze(1).tolist() == asked
    assert find_anchors(torch.tensor(turns)).tolist() == [place - 1 for place in asked if place > 0]


def test_answers_are_where_their_turns_begin_and_end():
    assert find_answer_spans(torch.tensor([0, 1, 1, 2, 0, 0, 3])) == [(1, 3), (3, 4), (6, 7)]
    assert find_answer_spans(torch.tensor([1, 1])) == [(0, 2)]
    assert find_answer_spans(torch.tensor([0, 0])) == []


def test_tokens_left_in_turn_counts_down_inside_each_turn():
    assert tokens_left_in_turn(torch.tensor([0, 1, 1, 2, 0, 3, 3, 3])).tolist() == [0, 2, 1, 1, 0, 3, 2, 1]
