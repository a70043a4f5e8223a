"""Rounds of decoding along answers that are known: where a server would draft, and the accept length it will measure.

An average over every position promises too much: a round begins where the one before it went wrong, and what was hard
there is often still hard. On greedy answers of the bundled target, a chain of 7 gained 3.163 tokens begun at every
position and 2.431 in rounds, as decoding measures it (benchmarks/quickstart.py -- optim=adamw optim.lr=3e-3
kernels.loss_chunk=4096).

A round that begins at row t and accepts g drafts is followed by one at row t + g + 1: the target itself gives one token
more. Drafts behind the end of a turn count for nothing here; a server counts those too.

Shapes: R trained rows, ascending, those of one turn without a gap.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def begins_round(gained: Int[Tensor, " R"], rows: Int[Tensor, " R"]) -> Bool[Tensor, " R"]:
    """Return which rows begin a round; `gained`: how many drafts in a row are right if a chain begins at the row."""
    count = len(rows)
    after = torch.arange(count, device=rows.device) + gained + 1
    same_turn = (after < count) & (rows[after.clamp(max=count - 1)] - rows == gained + 1)
    jump = torch.cat([torch.where(same_turn, after, count), after.new_tensor([count])])  # the last place: no row
    begins = torch.ones_like(jump)
    begins[1:-1] = rows.diff() != 1
    # Each time what lies twice as many rounds ahead: a GPU waits for no row.
    for _ in range(count.bit_length()):
        begins = begins.scatter_reduce(0, jump, begins, "amax")
        jump = jump[jump]
    return begins[:-1].bool()


def rounds(gained: Int[Tensor, " R"], rows: Int[Tensor, " R"], *, steps: int) -> Int[Tensor, " C"]:
    """Return how many verifications accept exactly 0, 1, … `steps` drafts, with chains of `steps`; C = steps + 1."""
    gained = gained.clamp(max=steps)
    return torch.bincount(gained[begins_round(gained, rows)], minlength=steps + 1)
