"""The plan of an epoch: which samples form which pack, in which order, on which rank.

A plan depends only on seed, epoch and world size, so that a resumed run and every rank compute the same one. A
checkpoint therefore stores only how many packs were trained, and each sample is trained exactly once per epoch.

A plan is stored as arrays, so that ten million samples are planned in seconds. Shapes: N samples, P packs of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3.errors import InputError
from eagle3.features.samples import SampleRef, Samples


@dataclass(frozen=True)
class PlannedPack:
    """The samples of a pack, and the size of the optimizer step that it belongs to, divided by the step's packs."""

    samples: tuple[SampleRef, ...]
    anchors_in_step: float
    samples_in_step: float


@dataclass(frozen=True, eq=False)
class EpochPlan(Sequence[PlannedPack]):
    """The packs of one rank. Pack p of all ranks has the samples at `order[bounds[p]:bounds[p + 1]]`."""

    samples: Samples
    order: np.ndarray  # N
    bounds: np.ndarray  # P + 1
    packs: np.ndarray  # this rank's, in order
    anchors_in_step: np.ndarray  # per pack of this rank
    samples_in_step: np.ndarray

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, place: Any) -> Any:
        pack = self.packs[place]
        numbers = self.order[self.bounds[pack] : self.bounds[pack + 1]].tolist()
        refs = tuple(self.samples[number] for number in numbers)
        return PlannedPack(refs, float(self.anchors_in_step[place]), float(self.samples_in_step[place]))


def plan_epoch(
    samples: Samples, *, pack_tokens: int, world_size: int, accumulate: int, shuffle_seed: int | None
) -> list[EpochPlan]:
    """Return a plan per rank, all with the same number of packs; `shuffle_seed=None` keeps the order of the store."""
    drawn = None if shuffle_seed is None else np.random.default_rng(shuffle_seed)
    order = drawn.permutation(len(samples)) if drawn else np.arange(len(samples))
    bounds = fill(samples.tokens[order], pack_tokens)
    bounds = halve_until_divisible(bounds, world_size)
    packs = np.arange(len(bounds) - 1)
    if drawn and world_size > 1:
        packs = similar_packs_together(sums(samples.anchors[order], bounds), world_size, drawn)
    return spread(samples, order, bounds, packs.reshape(-1, world_size).T, accumulate)


def not_taken(samples: Samples, plans: Sequence[EpochPlan], consumed: int) -> Samples:
    """Return the samples that are left after each rank has trained so many packs of these plans."""
    left = np.ones(len(samples), bool)
    for plan in plans:
        for pack in plan.packs[:consumed]:
            left[plan.order[plan.bounds[pack] : plan.bounds[pack + 1]]] = False
    return samples.take(left)


def spread(
    samples: Samples, order: np.ndarray, bounds: np.ndarray, packs: np.ndarray, accumulate: int
) -> list[EpochPlan]:
    """Return the plans of all ranks; row r of `packs` lists the packs that rank r trains, in order."""
    step_size = len(packs) * accumulate
    steps, step_of = np.arange(0, packs.shape[1], accumulate), np.arange(packs.shape[1]) // accumulate
    anchors, sizes = sums(samples.anchors[order], bounds)[packs].sum(0), np.diff(bounds)[packs].sum(0)
    # Gradients are averaged over ranks and micro-batches: divide by step_size even if an epoch's last step has fewer.
    anchors_in_step = np.maximum(np.add.reduceat(anchors, steps), 1)[step_of] / step_size
    samples_in_step = np.add.reduceat(sizes, steps)[step_of] / step_size
    return [EpochPlan(samples, order, bounds, row, anchors_in_step, samples_in_step) for row in packs]


def sums(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Add up the values of each pack."""
    return np.add.reduceat(values, bounds[:-1], dtype=np.int64)


def fill(tokens: np.ndarray, pack_tokens: int) -> np.ndarray:
    """Fill each pack until the next sample would not fit, and return the bounds of the packs."""
    ends = np.cumsum(tokens, dtype=np.int64)
    # For a pack that began at each sample, where the next one would begin; only a few of these are followed.
    following = np.searchsorted(ends, ends - tokens + pack_tokens, side="right")
    following = memoryview(np.maximum(following, np.arange(1, len(ends) + 1)))  # a sample that is too long is alone
    bounds = [0]
    while bounds[-1] < len(tokens):
        bounds.append(following[bounds[-1]])
    return np.array(bounds)


def halve_until_divisible(bounds: np.ndarray, world_size: int) -> np.ndarray:
    """Halve the packs with the most samples until all ranks get as many, so that no sample is dropped or repeated."""
    while (len(bounds) - 1) % world_size:
        sizes = np.diff(bounds)
        largest = int(sizes.argmax())
        if sizes[largest] < 2:
            raise InputError(
                f"{len(sizes)} packs of one sample cannot be spread over trainer.devices={world_size} ranks; "
                f"use fewer devices, more data, or for the validation a larger data.val_fraction"
            )
        bounds = np.insert(bounds, largest + 1, bounds[largest] + sizes[largest] // 2)
    return bounds


def similar_packs_together(anchors: np.ndarray, world_size: int, drawn: np.random.Generator) -> np.ndarray:
    """Give the ranks of a step packs with about the same number of anchors: all wait for the slowest rank."""
    groups = np.argsort(anchors, kind="stable").reshape(-1, world_size)
    return groups[drawn.permutation(len(groups))].ravel()
