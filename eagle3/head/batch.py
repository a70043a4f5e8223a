"""The batch of a training step: a pack, and its anchors.

Shapes: N samples and T tokens of the pack, R anchors, U turns with anchors, K steps.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.data.pack import Batch, Pack
from eagle3.head.anchors import anchors_and_steps, pairs_before, runs
from eagle3.head.segments import Segments, build_segments, turns_of_samples


@dataclass(frozen=True, kw_only=True)
class TttBatch(Batch):
    """A pack with its anchors. Counts that would need a host sync on a GPU are made here, on the CPU."""

    anchor_steps: Int[Tensor, " R"]  # number of TTT steps that the anchor is trained for
    anchors_of_sample: Int[Tensor, " R"]  # number of anchors of the anchor's sample
    anchor_bounds: tuple[int, ...]  # N + 1: where samples begin and end in R
    pair_bounds: tuple[int, ...]  # R + 1: (step, anchor) pairs of the loss before each teacher, see `pairs_before`
    turn_bounds: tuple[int, ...]  # U + 1: where the consecutive anchors of a turn begin and end in R
    segments: tuple[Segments, ...]  # calls of a flash kernel: each turn's own span, then earlier turns


def prepare_ttt(pack: Pack, ttt_steps: int) -> TttBatch:
    """Find the anchors of a pack on the CPU, for `ttt_steps` steps of the unroll."""
    starts = torch.tensor(pack.token_bounds)
    sample_of = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())  # (T,)
    # One numbering for the pack: a sample may end with an answer, and the next begin with one.
    turns = torch.where(pack.turns > 0, pack.turns + sample_of * (pack.turns.max() + 1), 0)
    anchors, steps = anchors_and_steps(turns, ttt_steps)
    of_one_sample = sample_of[anchors] == sample_of[anchors + 1]
    anchors, steps = anchors[of_one_sample], steps[of_one_sample]
    counts = torch.bincount(sample_of[anchors], minlength=len(starts) - 1)
    turn_bounds, turn_ends = runs(anchors)
    spans = turns_of_samples(turn_bounds, turn_ends, pack.token_bounds)
    return TttBatch(
        pack=pack,
        anchors=anchors,
        anchor_steps=steps,
        anchors_of_sample=counts[sample_of[anchors]],
        anchor_bounds=(0, *counts.cumsum(0).tolist()),
        pair_bounds=pairs_before(steps),
        turn_bounds=turn_bounds,
        segments=build_segments(spans, len(anchors), pack.token_bounds[-1]),
    )
