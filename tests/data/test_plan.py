"""Plans of an epoch: every sample once, within the budget, the same number of packs on every rank."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from stores import open_store, random_samples, write_store

from eagle3.data.plan import PlannedPack, plan_epoch
from eagle3.errors import InputError
from eagle3.features.samples import Samples


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    return open_store(write_store(tmp_path, random_samples(37))).samples


def tokens(pack: PlannedPack) -> int:
    return sum(ref.entry.tokens for ref in pack.samples)


def ids(packs: Sequence[PlannedPack]) -> list[str]:
    return [ref.entry.id for pack in packs for ref in pack.samples]


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (1, 4), (3, 1), (5, 3)])
def test_ranks_share_the_samples_in_as_many_packs_each_and_divide_by_the_whole_step(samples, world_size, accumulate):
    plans = plan_epoch(samples, pack_tokens=40, world_size=world_size, accumulate=accumulate, shuffle_seed=1)
    assert len({len(each) for each in plans}) == 1
    packs = [pack for each in plans for pack in each]
    assert sorted(ids(packs)) == sorted(ref.entry.id for ref in samples)
    assert all(tokens(pack) <= 40 for pack in packs)
    size = world_size * accumulate
    for first in range(0, len(plans[0]), accumulate):  # the last step may be short
        step = [pack for each in plans for pack in [*each][first : first + accumulate]]
        anchors = sum(ref.entry.anchors for pack in step for ref in pack.samples)
        assert {pack.anchors_in_step for pack in step} == {max(anchors, 1) / size}
        assert {pack.samples_in_step for pack in step} == {sum(len(pack.samples) for pack in step) / size}


@pytest.mark.parametrize("seed", [None, 1])
def test_a_pack_is_filled_until_the_next_sample_would_not_fit(samples, seed):
    [plan] = plan_epoch(samples, pack_tokens=40, world_size=1, accumulate=1, shuffle_seed=seed)
    assert all(tokens(pack) + following.samples[0].entry.tokens > 40 for pack, following in pairwise(plan))
    assert (ids(plan) == [ref.entry.id for ref in samples]) is (seed is None)
    [plan] = plan_epoch(samples, pack_tokens=1, world_size=1, accumulate=1, shuffle_seed=0)
    assert [len(pack.samples) for pack in plan] == [1] * 37


def test_the_same_seed_gives_the_same_plan_and_another_epoch_another(samples):
    def packs(seed: int) -> list[Sequence[PlannedPack]]:
        return [[*each] for each in plan_epoch(samples, pack_tokens=40, world_size=2, accumulate=1, shuffle_seed=seed)]

    assert packs(5) == packs(5) != packs(6)


def test_ranks_train_packs_of_about_the_same_number_of_rows_at_the_same_time(tmp_path):
    samples = open_store(write_store(tmp_path, random_samples(300))).samples
    plans = plan_epoch(samples, pack_tokens=60, world_size=4, accumulate=1, shuffle_seed=0)
    steps = [[sum(ref.entry.anchors for ref in pack.samples) for pack in step] for step in zip(*plans, strict=True)]
    waits = [max(rows) - min(rows) for rows in steps]
    assert sum(waits) < 0.1 * sum(max(rows) for rows in steps)
    assert [sum(rows) for rows in steps] != sorted(sum(rows) for rows in steps)  # but steps come in any order


def test_fewer_samples_than_ranks_are_refused_with_the_key(samples):
    with pytest.raises(InputError, match=r"trainer\.devices=8"):
        plan_epoch(samples.take(np.arange(3)), pack_tokens=40, world_size=8, accumulate=1, shuffle_seed=0)
