"""Plans of an epoch: every sample once, within the budget, the same number of packs on every rank."""

from pathlib import Path

import pytest
from stores import open_store, random_samples, write_store

from eagle3.data.plan import PlannedPack, plan_epoch
from eagle3.errors import InputError
from eagle3.features.source import SampleRef


@pytest.fixture
def samples(tmp_path: Path) -> list[SampleRef]:
    return open_store(write_store(tmp_path, random_samples(37))).samples


def ids(plan: list[PlannedPack]) -> list[str]:
    return [ref.entry.id for pack in plan for ref in pack.samples]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_each_sample_is_planned_once_and_ranks_take_equally_many_packs(
    samples: list[SampleRef], world_size: int, accumulate: int
) -> None:
    plans = plan_epoch(samples, pack_tokens=40, world_size=world_size, accumulate=accumulate, shuffle_seed=1)
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(name for plan in plans for name in ids(plan)) == sorted(ref.entry.id for ref in samples)
    for pack in (pack for plan in plans for pack in plan):
        assert sum(ref.entry.tokens for ref in pack.samples) <= 40


def test_the_same_seed_gives_the_same_plan_and_another_epoch_another(samples: list[SampleRef]) -> None:
    options = {"pack_tokens": 40, "world_size": 2, "accumulate": 1}
    assert plan_epoch(samples, shuffle_seed=5, **options) == plan_epoch(samples, shuffle_seed=5, **options)
    assert plan_epoch(samples, shuffle_seed=5, **options) != plan_epoch(samples, shuffle_seed=6, **options)


def test_the_normaliser_is_the_whole_optimizer_steps_over_ranks_and_accumulation(samples: list[SampleRef]) -> None:
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


def test_fewer_samples_than_ranks_is_refused_with_the_key(samples: list[SampleRef]) -> None:
    with pytest.raises(InputError, match=r"trainer\.devices=8"):
        plan_epoch(samples[:3], pack_tokens=40, world_size=8, accumulate=1, shuffle_seed=0)
