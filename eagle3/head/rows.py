"""Which rows of a sample are trained, at which steps of the unroll.

Row t joins feature h_t with the embedding of x_{t+1}; step k predicts x_{t+2+k}. It is trained iff
x_{t+1} … x_{t+2+k} all are answer tokens of one turn: a chain that serving could start there and accept so far.

    tokens        p0  p1  A  B  C  end           two of the prompt, then an answer
    row 1         takes h_1 and A: predicts B at step 0, C at step 1 (taking B), end at step 2 (taking C)
    row 2         takes h_2 and B: predicts C at step 0, end at step 1
    row 3         takes h_3 and C: predicts end at step 0
    rows 0, 4, 5  are not trained

Shapes: T tokens of a sample. `turns` is 0 at prompt tokens and i at the tokens of the i-th answer.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def teacher_rows(turns: Int[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """Positions j where x_j and x_{j+1} are answer tokens of one turn: only there a teacher is ever asked."""
    rows = torch.zeros_like(turns, dtype=torch.bool)
    rows[:-1] = (turns[:-1] > 0) & (turns[:-1] == turns[1:])
    return rows


def trained_rows(turns: Int[Tensor, " T"], ttt_steps: int) -> tuple[Int[Tensor, " R"], Int[Tensor, " R"]]:
    """Rows trained at step 0, ascending, and the number of steps (1 … ttt_steps) that each is trained for."""
    remaining = tokens_left_in_turn(turns)
    depth = (remaining[1:] - 1).clamp(max=ttt_steps)
    rows = torch.nonzero(depth > 0).squeeze(1)
    return rows, depth[rows]


def runs(rows: Int[Tensor, " R"]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where runs of consecutive rows begin and end in `rows` (one more than runs), and the row behind each run.

    For trained rows a run is a turn: the row before a turn's last token is never trained.
    """
    last_of_run = torch.ones_like(rows, dtype=torch.bool)
    last_of_run[:-1] = rows.diff() != 1
    ends = last_of_run.nonzero().squeeze(1)
    return (0, *(ends + 1).tolist()), tuple((rows[ends] + 1).tolist())


def pairs_before(depth: Int[Tensor, " R"], ttt_steps: int) -> tuple[int, ...]:
    """R + 1 counts: how many trained (step, row) pairs ask a teacher before the i-th, the one of row i at step 0.

    Rows of a turn are neighbours, so that row i asks at step k the teacher of row i + k at step 0. These are on the CPU
    when a pack is built: a GPU would have to be waited for.
    """
    rows = torch.arange(len(depth))
    teachers = torch.cat([rows[depth > step] + step for step in range(ttt_steps)])
    return (0, *torch.bincount(teachers, minlength=len(depth)).cumsum(0).tolist())


def tokens_left_in_turn(turns: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
    """For each position the length of the run of equal turn numbers that starts there; 0 at prompt tokens."""
    positions = torch.arange(len(turns))
    last_of_run = torch.ones_like(turns, dtype=torch.bool)
    last_of_run[:-1] = turns[:-1] != turns[1:]
    # The end of the run that holds a position is the smallest run end at or after it.
    run_end = torch.where(last_of_run, positions, len(turns)).flip(0).cummin(0).values.flip(0)
    return torch.where(turns > 0, run_end - positions + 1, 0)
