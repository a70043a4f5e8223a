"""The plan of an epoch: which samples form which pack, in which order, on which rank.

A plan depends on (seed, epoch, world size) alone, so that a resumed run and every rank compute the same one: nothing
but the number of packs already trained has to be remembered, and each sample is trained exactly once an epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle3.errors import InputError
from eagle3.features.source import SampleRef


@dataclass(frozen=True)
class PlannedPack:
    """The samples, and what the whole optimizer step that the pack belongs to holds, per pack."""

    samples: tuple[SampleRef, ...]
    anchors_in_step: float
    samples_in_step: float


def plan_epoch(
    samples: Sequence[SampleRef], *, pack_tokens: int, world_size: int, accumulate: int, shuffle_seed: int | None
) -> list[list[PlannedPack]]:
    """Packs of each rank, the same number on all; `shuffle_seed=None` keeps the order of the store."""
    drawn = None if shuffle_seed is None else np.random.default_rng(shuffle_seed)
    if drawn:
        samples = [samples[number] for number in drawn.permutation(len(samples))]
    packs = fill(samples, pack_tokens)
    split_until_divisible(packs, world_size)
    if drawn and world_size > 1:
        packs = alike_side_by_side(packs, world_size, drawn)
    planned: list[list[PlannedPack]] = [[] for _ in range(world_size)]
    step_size = world_size * accumulate
    for first in range(0, len(packs), step_size):
        step = packs[first : first + step_size]
        anchors_in_step = sum(num_anchors(pack) for pack in step)
        samples_in_step = sum(len(pack) for pack in step)
        # Ranks and micro-batches are averaged, by step_size even where an epoch's last step is short of packs.
        for number, pack in enumerate(step):
            planned[number % world_size].append(
                PlannedPack(tuple(pack), max(anchors_in_step, 1) / step_size, samples_in_step / step_size)
            )
    return planned


def fill(samples: Sequence[SampleRef], pack_tokens: int) -> list[list[SampleRef]]:
    """Put samples into the current pack until the next one would not fit."""
    packs: list[list[SampleRef]] = []
    room = 0
    for ref in samples:
        if ref.entry.tokens > room:
            packs.append([])
            room = pack_tokens
        packs[-1].append(ref)
        room -= ref.entry.tokens
    return packs


def split_until_divisible(packs: list[list[SampleRef]], world_size: int) -> None:
    """Halve the packs with the most samples until all ranks get the same number: nothing dropped, nothing repeated."""
    while len(packs) % world_size:
        largest = max(range(len(packs)), key=lambda number: len(packs[number]))
        pack = packs[largest]
        if len(pack) < 2:
            raise InputError(
                f"{len(packs)} packs of one sample do not spread over trainer.devices={world_size} ranks; "
                f"use fewer devices or more data"
            )
        packs[largest : largest + 1] = [pack[: len(pack) // 2], pack[len(pack) // 2 :]]


def alike_side_by_side(
    packs: list[list[SampleRef]], world_size: int, drawn: np.random.Generator
) -> list[list[SampleRef]]:
    """Put packs of about the same number of anchors side by side: the slowest rank makes the others wait."""
    by_anchors = sorted(packs, key=num_anchors)
    groups = [by_anchors[first : first + world_size] for first in range(0, len(packs), world_size)]
    return [pack for number in drawn.permutation(len(groups)) for pack in groups[number]]


def num_anchors(pack: list[SampleRef]) -> int:
    return sum(ref.entry.anchors for ref in pack)
