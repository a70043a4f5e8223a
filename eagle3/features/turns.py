"""The answers within a sample, and the anchors: the positions where drafts begin.

`turns` [T] is 0 at prompt tokens and i at the tokens of the i-th answer, its end-of-turn token included. An *anchor* is
a position t at which a chain of drafts can begin in serving: the target has just given x_{t+1}, an answer token, and
the first draft is to be x_{t+2}, an answer token of the same turn.

Shapes: T tokens of a sample, R anchors.
"""

from itertools import pairwise

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def teacher_positions(turns: Int[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """Mark the positions j where x_j and x_{j+1} are answer tokens of one turn: only there a teacher is ever asked."""
    marked = torch.zeros_like(turns, dtype=torch.bool)
    marked[:-1] = (turns[:-1] > 0) & (turns[:-1] == turns[1:])
    return marked


def find_anchors(turns: Int[Tensor, " T"]) -> Int[Tensor, " R"]:
    """Return the anchors, ascending: the position before each position that a teacher is asked at."""
    return teacher_positions(turns)[1:].nonzero().squeeze(1)


def find_answer_spans(turns: Int[Tensor, " T"]) -> list[tuple[int, int]]:
    """Return the begin and end (exclusive) of each answer, or of each run of another mark above 0."""
    bounds = [0, *(turns.diff().nonzero().squeeze(1) + 1).tolist(), len(turns)]
    return [(begin, end) for begin, end in pairwise(bounds) if turns[begin] > 0]


def tokens_left_in_turn(turns: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
    """Count, at each position, the tokens from there to the end of its answer; 0 at prompt tokens."""
    positions = torch.arange(len(turns))
    last_of_run = torch.ones_like(turns, dtype=torch.bool)
    last_of_run[:-1] = turns[:-1] != turns[1:]
    # The end of the run that holds a position is the smallest run end at or after it.
    run_end = torch.where(last_of_run, positions, len(turns)).flip(0).cummin(0).values.flip(0)
    return torch.where(turns > 0, run_end - positions + 1, 0)
