"""Finds the trained anchors, and their steps of the training-time test (TTT, EAGLE-3's unroll, arXiv:2503.01840).

Anchor t joins feature h_t with the embedding of x_{t+1}; step k predicts x_{t+2+k}. It is trained iff
x_{t+1} … x_{t+2+k} are all answer tokens of one turn: a chain that serving could start there and accept so far.

    tokens           p0  p1  A  B  C  end        two of the prompt, then an answer
    anchor 1         takes h_1 and A: predicts B at step 0, C at step 1 (taking B), end at step 2 (taking C)
    anchor 2         takes h_2 and B: predicts C at step 0, end at step 1
    anchor 3         takes h_3 and C: predicts end at step 0
    positions 0, 4, 5    are not anchors

SpecForge masks position t by whether x_t itself is an answer token. That leaves out anchor 1, with which every answer's
drafts begin, and trains positions whose chains reach past the end of the turn. The authors' code has this
rule at step 0, except for two positions, and only for Llama-3's template; docs/concepts/anchors.md compares both.

Shapes: T tokens of a sample, R anchors, K steps.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.features.turns import find_anchors, tokens_left_in_turn


def anchors_and_steps(turns: Int[Tensor, " T"], ttt_steps: int) -> tuple[Int[Tensor, " R"], Int[Tensor, " R"]]:
    """Return the anchors, ascending, and the number of steps (1 … ttt_steps) that each is trained for."""
    anchors = find_anchors(turns)
    return anchors, (tokens_left_in_turn(turns)[anchors + 1] - 1).clamp(max=ttt_steps)


def runs(anchors: Int[Tensor, " R"]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where runs of consecutive anchors begin and end in R (one more than runs), and the position after each.

    A run is a turn: the position before a turn's last token is never an anchor.
    """
    last_of_run = torch.ones_like(anchors, dtype=torch.bool)
    last_of_run[:-1] = anchors.diff() != 1
    ends = last_of_run.nonzero().squeeze(1)
    return (0, *(ends + 1).tolist()), tuple((anchors[ends] + 1).tolist())


def pairs_before(anchor_steps: Int[Tensor, " R"]) -> tuple[int, ...]:
    """Return R + 1 counts: the trained (step, anchor) pairs whose teacher precedes that of anchor i at step 0.

    Anchors of a turn are consecutive, so anchor i asks at step k the teacher of anchor i + k at step 0. Counted on the
    CPU when a pack is prepared, because counting on a GPU would need a host sync.
    """
    count = len(anchor_steps)
    # Anchor i asks the teachers i … i + steps - 1: at each teacher one anchor begins, and some have ended.
    ended = torch.bincount(torch.arange(count) + anchor_steps, minlength=count)[:count]
    return (0, *(1 - ended).cumsum(0).cumsum(0).tolist())
