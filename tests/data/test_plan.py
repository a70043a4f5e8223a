"""Plans of an epoch: every sample once, within the budget, the same number of packs on every rank."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import open_store, random_samples, write_store

from eagle3.data.plan import PlannedPack, plan_epoch
from eagle3.errors import InputError
from eagle3.features.samples import SampleRef, Samples


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    return open_store(write_store(tmp_path, random_samples(37))).samples


def ids(plan: Sequence[PlannedPack]) -> list[str]:
    return [ref.entry.id for pack in plan for ref in pack.samples]


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 4), (2, 1), (3, 4), (5, 1)])
def test_each_sample_is_planned_once_and_ranks_take_equally_many_packs(
    samples: Samples, world_size: int, accumulate: int
) -> None:
    plans = plan_epoch(samples, pack_tokens=40, world_size=world_size, accumulate=accumulate, shuffle_seed=1)
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(name for plan in plans for name in ids(plan)) == sorted(ref.entry.id for ref in samples)
    for pack in (pack for plan in plans for pack in plan):
        assert sum(ref.entry.tokens for ref in pack.samples) <= 40


def test_the_same_seed_gives_the_same_plan_and_another_epoch_another(samples: Samples) -> None:
    options = {"pack_tokens": 40, "world_size": 2, "accumulate": 1}
    one, same, other = ([list(plan) for plan in plan_epoch(samples, shuffle_seed=s, **options)] for s in (5, 5, 6))
    assert one == same != other


def test_the_normaliser_is_the_whole_optimizer_steps_over_ranks_and_accumulation(samples: Samples) -> None:
    plans = plan_epoch(samples, pack_tokens=40, world_size=2, accumulate=3, shuffle_seed=0)
    for first in range(0, len(plans[0]), 3):
        step = [pack for plan in plans for pack in plan[first : first + 3]]
        anchors = sum(ref.entry.anchors for pack in step for ref in pack.samples)
        assert {pack.anchors_in_step for pack in step} == {anchors / 6}
        assert {pack.samples_in_step for pack in step} == {sum(len(pack.samples) for pack in step) / 6}


def test_ranks_train_packs_of_about_the_same_number_of_rows_at_the_same_time(tmp_path: Path) -> None:
    samples = open_store(write_store(tmp_path, random_samples(300))).samples
    plans = plan_epoch(samples, pack_tokens=60, world_size=4, accumulate=1, shuffle_seed=0)
    steps = [[sum(ref.entry.anchors for ref in pack.samples) for pack in step] for step in zip(*plans, strict=True)]
    waits = [max(rows) - min(rows) for rows in steps]
    assert sum(waits) < 0.1 * sum(max(rows) for rows in steps)
    assert [sum(rows) for rows in steps] != sorted(sum(rows) for rows in steps)  # but steps come in any order


def test_fewer_samples_than_ranks_is_refused_with_the_key(samples: Samples) -> None:
    with pytest.raises(InputError, match=r"trainer\.devices=8"):
        plan_epoch(samples[:3], pack_tokens=40, world_size=8, accumulate=1, shuffle_seed=0)


def plain_plan(
    samples: Sequence[SampleRef], *, pack_tokens: int, world_size: int, accumulate: int, shuffle_seed: int | None
) -> list[list[PlannedPack]]:
    """The same plan, sample by sample."""
    drawn = None if shuffle_seed is None else np.random.default_rng(shuffle_seed)
    if drawn:
        samples = [samples[number] for number in drawn.permutation(len(samples))]
    packs: list[list[SampleRef]] = []
    for ref in samples:
        if not packs or sum(each.entry.tokens for each in packs[-1]) + ref.entry.tokens > pack_tokens:
            packs.append([])
        packs[-1].append(ref)
    while len(packs) % world_size:
        largest = max(range(len(packs)), key=lambda number: len(packs[number]))
        pack = packs[largest]
        packs[largest : largest + 1] = [pack[: len(pack) // 2], pack[len(pack) // 2 :]]

    def anchors(pack: list[SampleRef]) -> int:
        return sum(ref.entry.anchors for ref in pack)

    if drawn and world_size > 1:
        packs = sorted(packs, key=anchors)
        groups = [packs[first : first + world_size] for first in range(0, len(packs), world_size)]
        packs = [pack for number in drawn.permutation(len(groups)) for pack in groups[number]]
    planned: list[list[PlannedPack]] = [[] for _ in range(world_size)]
    size = world_size * accumulate
    for first in range(0, len(packs), size):
        step = packs[first : first + size]
        for number, pack in enumerate(step):
            sums = max(sum(map(anchors, step)), 1) / size, sum(map(len, step)) / size
            planned[number % world_size].append(PlannedPack(tuple(pack), *sums))
    return planned


def test_plans_of_arrays_are_those_made_sample_by_sample(tmp_path: Path) -> None:
    everything = open_store(write_store(tmp_path, random_samples(300))).samples
    drawn = random.Random(0)
    for _ in range(60):
        chosen = everything.take(np.array(drawn.sample(range(300), drawn.randint(20, 300))))
        options: Any = {
            "pack_tokens": drawn.choice([20, 40, 100, 10**6]),
            "world_size": drawn.randint(1, 7),
            "accumulate": drawn.randint(1, 3),
            "shuffle_seed": drawn.choice([None, drawn.randrange(2**64)]),
        }
        assert [list(plan) for plan in plan_epoch(chosen, **options)] == plain_plan(list(chosen), **options)
