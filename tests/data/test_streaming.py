"""Streaming order: every sample once, shards from front to back, a bounded buffer, the same after every resume."""

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feature_data import feature_data
from stores import open_store, random_samples, save_store

from eagle3.data.plan import EpochPlan
from eagle3.data.streaming import AHEAD, RUN_BYTES, StreamReader, plan_stream, through_buffer
from eagle3.features.loss_mask import LastTurn
from eagle3.features.samples import Samples
from eagle3.features.split import hash64
from eagle3.features.store import FeatureStore
from eagle3.head.batch import TttBatch
from eagle3.storage.folder import LocalFolder

BUFFER = 12


@pytest.fixture
def samples(store_path: Path) -> Samples:
    """60 samples in about ten shards."""
    return open_store(store_path).samples


def data_of(path: Any, *, order: str = "streaming", **changes: Any) -> Any:
    return feature_data(path, order=order, **changes)


def batches(data: Any) -> list[TttBatch]:
    return list(data.train_dataloader())


def ids(data: Any) -> list[tuple[str, ...]]:
    return [batch.pack.sample_ids for batch in batches(data)]


def planned(samples: Samples, *, world_size: int = 1) -> Any:
    return plan_stream(samples, pack_tokens=48, world_size=world_size, accumulate=1, shuffle_seed=1, buffer=BUFFER)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_stream_goes_through_each_shard_from_front_to_back(samples: Samples) -> None:
    for world_size in (1, 3):
        plans = planned(samples, world_size=world_size)
        assert all(sorted(place for pack in plan for place in pack.places) == sorted(plan.stream) for plan in plans)
        refs = [samples[int(place)] for plan in plans for place in plan.stream]
        shards = [key for key, _ in itertools.groupby(ref.shard for ref in refs)]
        assert len(shards) - len(set(shards)) == 0 and len(set(shards)) > 5  # ranks follow one another through a shard
        offsets = [[ref.entry.offset for ref in group] for _, group in itertools.groupby(refs, lambda ref: ref.shard)]
        assert all(each == sorted(each) for each in offsets)
        tokens = [int(samples.tokens[plan.stream].sum()) for plan in plans]
        assert max(tokens) - min(tokens) <= 2 * int(samples.tokens.max())


@pytest.mark.parametrize("buffer", [1, 2, 7, 100, 5000])
def test_a_sample_leaves_the_buffer_while_fewer_others_enter_than_it_holds(buffer: int) -> None:
    stream = np.random.default_rng(3).permutation(1000)
    order = through_buffer(stream, buffer, np.random.default_rng(4))
    assert sorted(order) == sorted(stream)
    assert (order.tolist() == stream.tolist()) == (buffer == 1)
    moved = np.abs(np.argsort(order) - np.argsort(stream))
    assert moved.max() < buffer and (buffer == 1 or moved.mean() > buffer / 8 or buffer > 1000)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("readers", "prefetch", "buffer"), [(1, 1, 12), (2, 2, 1), (4, 7, 12), (2, 7, 1000)])
def test_batches_are_those_of_samples_read_one_by_one(
    store_path: Path, readers: int, prefetch: int, buffer: int
) -> None:
    data = data_of(str(store_path), readers=readers, prefetch=prefetch, shuffle_buffer=buffer)
    [plan] = data._plans(data.train_samples, data._spread(), shuffle_seed=hash64(data.seed, 0))
    expected = [data._load(pack) for pack in plan]
    found = batches(data)
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert one.pack.sample_ids == other.pack.sample_ids
        assert all(torch.equal(left, right) for left, right in zip(one.tensors(), other.tensors(), strict=True))


def test_validation_is_as_ever(store_path: Path) -> None:
    streaming, shuffled = data_of(str(store_path)), data_of(str(store_path), order="shuffled")
    validated = [[pack.pack.sample_ids for pack in data.val_dataloader()] for data in (streaming, shuffled)]
    assert validated[0] == validated[1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_anywhere_in_an_epoch_continues_with_the_next_pack(store_path: Path, world_size: int) -> None:
    for rank in range(world_size):
        where = {"world_size": world_size, "global_rank": rank, "current_epoch": 2}
        whole = batches(data_of(str(store_path), **where))
        for consumed in range(1, len(whole) + 1):
            data = data_of(str(store_path), **where)
            data.resumed = {"epoch": 2, "consumed": consumed, "before": []}
            rest = batches(data)
            assert [batch.pack.sample_ids for batch in rest] == [batch.pack.sample_ids for batch in whole[consumed:]]
            for one, other in zip(rest, whole[consumed:], strict=True):
                assert torch.equal(one.pack.aux_hidden_states, other.pack.aux_hidden_states)


@pytest.mark.parametrize("changes", [{"weights": [2, 0.5]}, {"loss_mask": LastTurn()}])
def test_weights_and_loss_masks_stream_too(two_stores: list[str], changes: dict[str, Any]) -> None:
    streamed, shuffled = (
        Counter(name for pack in ids(data_of(two_stores, order=order, **changes)) for name in pack)
        for order in ("streaming", "shuffled")
    )
    assert streamed == shuffled


def reader_of(store: FeatureStore, plan: EpochPlan, consumed: int = 0) -> StreamReader:
    return StreamReader(store, plan.samples, plan.stream_after(consumed), ThreadPoolExecutor(AHEAD))


class Counted(FeatureStore):
    """Keeps which samples were read together."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.runs: list[list[str]] = []

    def read_run(self, refs: Any) -> Any:
        self.runs.append([ref.entry.id for ref in refs])
        return super().read_run(refs)


@pytest.mark.parametrize("consumed", [0, 5])
def test_each_sample_is_read_once_with_its_neighbours_and_no_more_are_held_than_the_buffer(
    store_path: Path, consumed: int
) -> None:
    store = Counted(LocalFolder(store_path))
    [plan] = planned(store.samples)
    reader = reader_of(store, plan, consumed)
    for number, pack in enumerate([*plan][consumed:], start=1):
        assert [sample.id for sample in reader.take(pack.places)] == [ref.entry.id for ref in pack.samples]
        ahead = max(map(len, store.runs)) * (AHEAD + 1)
        assert len(reader._read) <= BUFFER + ahead, number
    assert not reader._read
    read = [name for run in store.runs for name in run]
    assert Counter(read) == Counter(ref.entry.id for pack in [*plan][consumed:] for ref in pack.samples)
    if not consumed:
        assert len(store.runs) == len(store.manifest.shards) < 15  # a shard of some kilobytes is one range


def test_ranges_end_at_their_limit_and_at_holes(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Counted(LocalFolder(store_path))
    largest = max(ref.entry.size for ref in store.samples)
    assert 10 * largest < RUN_BYTES
    monkeypatch.setattr("eagle3.data.streaming.RUN_BYTES", 2 * largest + 1024)
    monkeypatch.setattr("eagle3.data.streaming.GAP_BYTES", 1024)
    thinned = store.samples.take(np.arange(60) % 3 > 0)
    [plan] = planned(thinned)
    reader = reader_of(store, plan)
    for pack in plan:
        reader.take(pack.places)
    reader.threads.shutdown()
    assert max(map(len, store.runs)) == 2  # every third sample is a hole
    assert sum(map(len, store.runs)) == 40


class Falsifying(LocalFolder):
    """As if behind a network: ranges come with a wrong byte until they are asked for with a hash."""

    remote = True

    def read(self, name: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> memoryview:
        content = super().read(name, start, stop)
        if sha256 is None and stop is not None:
            content = memoryview(bytearray(content))
            content[len(content) // 2] ^= 1
        return content


def test_a_wrong_byte_in_a_range_costs_one_request_and_is_never_trained(tmp_path: Path) -> None:
    save_store(LocalFolder(tmp_path), random_samples(30))
    plain, false = FeatureStore(LocalFolder(tmp_path)), FeatureStore(Falsifying(tmp_path))
    refs = list(plain.samples)
    run = [ref for ref in refs if ref.shard == refs[0].shard]
    for one, other in zip(false.read_run(run), plain.read_run(run), strict=True):
        assert torch.equal(one.aux_hidden_states, other.aux_hidden_states)
        assert torch.equal(one.input_ids, other.input_ids)
