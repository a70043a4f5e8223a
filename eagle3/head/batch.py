"""The batch of a training step: a pack, and its anchors.

Shapes: N samples and T tokens of the pack, R anchors, U turns with anchors, K steps.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3.data.pack import OnDevice, Pack, pack_samples
from eagle3.features.sample import Sample
from eagle3.features.turns import anchors_of
from eagle3.head.anchors import anchors_and_steps, pairs_before, runs


@dataclass(frozen=True, kw_only=True)
class TttBatch(OnDevice):
    """A pack with its anchors. Counts that would need a host sync on a GPU are made here, on the CPU."""

    pack: Pack
    anchors: Int[Tensor, " R"]  # ascending positions in the pack
    anchor_steps: Int[Tensor, " R"]  # number of TTT steps that the anchor is trained for
    anchors_of_sample: Int[Tensor, " R"]  # number of anchors of the anchor's sample
    anchor_bounds: tuple[int, ...]  # N + 1: where samples begin and end in R
    pair_bounds: tuple[int, ...]  # R + 1: trained (step, anchor) pairs before each teacher, see `pairs_before`
    turn_bounds: tuple[int, ...]  # U + 1: where the consecutive anchors of a turn begin and end in R
    turn_ends: tuple[int, ...]  # U: the position after a turn's last anchor

    @property
    def num_anchors(self) -> int:
        return len(self.anchors)


def prepare_ttt(pack: Pack, ttt_steps: int) -> TttBatch:
    """Find the anchors of a pack on the CPU, for `ttt_steps` steps of the unroll."""
    anchors, steps, of_sample, bounds = [], [], [], [0]
    for start, stop in pairwise(pack.token_bounds):
        sample_anchors, sample_steps = anchors_and_steps(pack.turns[start:stop], ttt_steps)
        anchors.append(sample_anchors + start)
        steps.append(sample_steps)
        of_sample.append(torch.full_like(sample_anchors, len(sample_anchors)))
        bounds.append(bounds[-1] + len(sample_anchors))
    turn_bounds, turn_ends = runs(torch.cat(anchors))
    return TttBatch(
        pack=pack,
        anchors=torch.cat(anchors),
        anchor_steps=torch.cat(steps),
        anchors_of_sample=torch.cat(of_sample),
        anchor_bounds=tuple(bounds),
        pair_bounds=pairs_before(torch.cat(steps), ttt_steps),
        turn_bounds=turn_bounds,
        turn_ends=turn_ends,
    )


def ttt_batch(
    samples: list[Sample], *, ttt_steps: int, anchors_in_step: float | None = None, samples_in_step: float | None = None
) -> TttBatch:
    """Pack samples and prepare them; by default they are a whole optimizer step."""
    anchors = sum(len(anchors_of(sample.turns)) for sample in samples)
    pack = pack_samples(
        samples,
        anchors_in_step=anchors if anchors_in_step is None else anchors_in_step,
        samples_in_step=len(samples) if samples_in_step is None else samples_in_step,
    )
    return prepare_ttt(pack, ttt_steps)
