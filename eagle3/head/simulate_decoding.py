"""Simulates decoding along known answers: where a server's rounds begin, and the accept length that it will measure.

An average over all anchors is too optimistic: a round begins where the previous one failed, and hard places follow one
another. On greedy answers of the bundled target, a chain of 7 gained 3.163 tokens from every anchor and 2.431 in
rounds, which is what decoding measures (benchmarks/quickstart.py -- optim=adamw optim.lr=3e-3 kernels.loss_chunk=4096).

After a round that begins at anchor t and accepts g drafts, the next one begins at t + g + 1: the target itself adds one
token. Drafts past the end of a turn do not count here; a server counts those too.

Shapes: R anchors, ascending, consecutive within a turn.
"""

from itertools import pairwise

import numpy as np
from jaxtyping import Int


def simulate_rounds(accepted: Int[np.ndarray, " R"], anchors: Int[np.ndarray, " R"], *, steps: int) -> list[int]:
    """Return how many verifications accept exactly 0, 1, … `steps` drafts, with chains of `steps`.

    `accepted`: drafts that a chain from each anchor gets right. In PyTorch some hundred small operations wake its team
    of threads, which takes longer than this walk.
    """
    counts = [0] * (steps + 1)
    depths = accepted.clip(max=steps).tolist()
    begins = np.flatnonzero(np.diff(anchors, prepend=-2) != 1).tolist()  # of turns
    for begin, end in pairwise([*begins, len(anchors)]):
        for drafts in rounds_of_turn(depths[begin:end]):
            counts[drafts] += 1
    return counts


def rounds_of_turn(accepted: list[int]) -> list[int]:
    """Return how many drafts each round of a turn accepts, given how many a round at each place would accept."""
    place, rounds = 0, []
    while place < len(accepted):
        rounds.append(accepted[place])
        place += accepted[place] + 1
    return rounds
