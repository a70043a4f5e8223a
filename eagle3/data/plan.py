"""The plan of an epoch: which samples form which pack, in which order, on which rank.

A plan depends on (seed, epoch, world size) alone, so that a resumed run and every rank compute the same one: nothing
but the number of packs already trained has to be remembered, and each sample is trained exactly once an epoch.

It is arrays, for ten million samples are planned in seconds so. Shapes: N samples, P packs of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from eagle3.errors import InputError
from eagle3.features.samples import SampleRef, Samples


@dataclass(frozen=True)
class PlannedPack:
    """The samples, and what the whole optimizer step that the pack belongs to holds, per pack."""

    samples: tuple[SampleRef, ...]
    anchors_in_step: float
    samples_in_step: float


@dataclass(frozen=True, eq=False)
class EpochPlan(Sequence[PlannedPack]):
    """The packs of one rank. Pack p of all holds the samples at `order[bounds[p]:bounds[p + 1]]`."""

    samples: Samples
    order: np.ndarray  # N
    bounds: np.ndarray  # P + 1
    packs: np.ndarray  # this rank's, in order
    anchors_in_step: np.ndarray  # of each of them
    samples_in_step: np.ndarray

    def __len__(self) -> int:
        return len(self.packs)

    @overload
    def __getitem__(self, place: int) -> PlannedPack: ...
    @overload
    def __getitem__(self, place: slice) -> list[PlannedPack]: ...
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        pack = self.packs[place]
        refs = tuple(self.samples[number] for number in self.order[self.bounds[pack] : self.bounds[pack + 1]])
        return PlannedPack(refs, float(self.anchors_in_step[place]), float(self.samples_in_step[place]))


def plan_epoch(
    samples: Samples, *, pack_tokens: int, world_size: int, accumulate: int, shuffle_seed: int | None
) -> list[EpochPlan]:
    """Packs of each rank, the same number on all; `shuffle_seed=None` keeps the order of the store."""
    drawn = None if shuffle_seed is None else np.random.default_rng(shuffle_seed)
    order = drawn.permutation(len(samples)) if drawn else np.arange(len(samples))
    bounds = split_until_divisible(fill(samples.tokens[order], pack_tokens), world_size)
    sizes, anchors = np.diff(bounds), np.add.reduceat(samples.anchors[order], bounds[:-1], dtype=np.int64)
    packs = np.arange(len(sizes))
    if drawn and world_size > 1:
        packs = alike_side_by_side(anchors, world_size, drawn)
    step_size = world_size * accumulate
    steps = np.arange(0, len(packs), step_size)
    step_of = np.arange(len(packs)) // step_size
    # Ranks and micro-batches are averaged, by step_size even where an epoch's last step is short of packs.
    anchors_in_step = np.maximum(np.add.reduceat(anchors[packs], steps), 1)[step_of] / step_size
    samples_in_step = np.add.reduceat(sizes[packs], steps)[step_of] / step_size
    ranks = [slice(rank, None, world_size) for rank in range(world_size)]
    return [
        EpochPlan(samples, order, bounds, packs[rank], anchors_in_step[rank], samples_in_step[rank]) for rank in ranks
    ]


def fill(tokens: np.ndarray, pack_tokens: int) -> np.ndarray:
    """Put samples into the current pack until the next one would not fit; the bounds of the packs."""
    ends = np.cumsum(tokens, dtype=np.int64)
    # Where the next pack would begin, for a pack that begins at each sample: only a few of them are followed.
    following = np.searchsorted(ends, ends - tokens + pack_tokens, side="right")
    following = memoryview(np.maximum(following, np.arange(1, len(ends) + 1)))  # a sample that is too long goes alone
    bounds = [0]
    while bounds[-1] < len(tokens):
        bounds.append(following[bounds[-1]])
    return np.array(bounds)


def split_until_divisible(bounds: np.ndarray, world_size: int) -> np.ndarray:
    """Halve the packs with the most samples until all ranks get the same number: nothing dropped, nothing repeated."""
    while (len(bounds) - 1) % world_size:
        sizes = np.diff(bounds)
        largest = int(sizes.argmax())
        if sizes[largest] < 2:
            raise InputError(
                f"{len(sizes)} packs of one sample do not spread over trainer.devices={world_size} ranks; "
                f"use fewer devices or more data"
            )
        bounds = np.insert(bounds, largest + 1, bounds[largest] + sizes[largest] // 2)
    return bounds


def alike_side_by_side(anchors: np.ndarray, world_size: int, drawn: np.random.Generator) -> np.ndarray:
    """Put packs of about the same number of anchors side by side: the slowest rank makes the others wait."""
    groups = np.argsort(anchors, kind="stable").reshape(-1, world_size)
    return groups[drawn.permutation(len(groups))].ravel()
