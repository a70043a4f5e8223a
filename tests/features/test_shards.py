"""Shards on disk: what is written is read back, by us and by webdataset; damage is named and refused."""

import gc
import hashlib
import os
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import webdataset
from safetensors.torch import load
from stores import in_float32, in_fp8, open_store, random_sample, random_samples, shard_path, write_store

from eagle3.errors import InputError
from eagle3.features import shards
from eagle3.features.index import parse_index
from eagle3.features.sample import Sample, ScaledRows, ids_from_bytes
from eagle3.features.shards import ShardWriter
from eagle3.features.store import FeatureStore
from eagle3.storage.folder import LocalFolder


def one_shard(folder: Path, samples: list[Sample]) -> tuple[FeatureStore, Path]:
    return open_store(write_store(folder, samples, shard_bytes=10**9)), shard_path(folder, 0)


def assert_same(one: Sample, other: Sample) -> None:
    assert one.id == other.id
    for name in ("input_ids", "turns", "aux_hidden_states", "last_hidden_state", "teacher_argmax", "has_teacher"):
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, ScaledRows):
            assert torch.equal(left.exponents, right.exponents), name
            left, right = left.values, right.values
        assert torch.equal(left.to(right.dtype), right), name


@pytest.mark.parametrize("stored", ["bfloat16", "float32", "fp8"])
def test_samples_come_back_as_written_without_padding_a_copy_or_a_change_of_the_file(tmp_path, stored):
    samples = [*random_samples(8), in_float32(random_sample([0, 0, 1], sample_id="no teacher#0"))]
    if stored == "fp8":
        samples = [in_fp8(sample) for sample in samples]
    else:
        names, dtype = ("aux_hidden_states", "last_hidden_state"), getattr(torch, stored)
        samples = [replace(each, **{name: getattr(each, name).to(dtype) for name in names}) for each in samples]
    store, path = one_shard(tmp_path, samples)
    content = path.read_bytes()
    for ref, sample in zip(store.samples, samples, strict=True):
        read = store.read(ref)
        assert_same(read, sample)
        assert (ref.entry.tokens, ref.entry.answer_tokens) == (len(sample.turns), int((sample.turns > 0).sum()))
        rows = [read.aux_hidden_states, read.last_hidden_state]
        tensors = [each for row in rows for each in (vars(row).values() if isinstance(row, ScaledRows) else [row])]
        ids = 2 * len(sample.input_ids) + 2 * len(sample.teacher_argmax)
        assert ref.entry.size < sum(each.nbytes for each in tensors) + ids + 700  # and the safetensors header
        if len(read.last_hidden_state):
            tensors[0].view(torch.uint8).fill_(7)
            again = store.read(ref).aux_hidden_states
            again = again.values if isinstance(again, ScaledRows) else again
            assert (again.view(torch.uint8) == 7).all()  # the same memory
    assert path.read_bytes() == content and b"pickle" not in content
    assert_same(open_store(tmp_path).read(store.samples[0]), samples[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves the file open
def test_webdataset_reads_our_shards(tmp_path):
    samples = random_samples(5)
    _, path = one_shard(tmp_path, samples)
    dataset = webdataset.WebDataset(str(path), shardshuffle=False)
    for item, sample in zip(dataset, samples, strict=True):
        tensors = load(item["safetensors"])
        assert torch.equal(tensors["aux_hidden_states"], sample.aux_hidden_states)
        assert ids_from_bytes(tensors["input_ids"].numpy()).tolist() == sample.input_ids.tolist()
    del dataset
    gc.collect()  # while its warning is still ignored


def test_nothing_appears_under_the_shards_name_before_it_is_whole(tmp_path):
    writer = ShardWriter(LocalFolder(tmp_path), 0)
    writer.add(random_samples(1)[0])
    assert list(tmp_path.glob("shard-*")) == []
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_the_index_has_the_hash_of_the_whole_tar_also_when_writing_is_slow(tmp_path):
    folder = tmp_path / "new" / "folder"
    writer = ShardWriter(LocalFolder(folder), 0)
    writer.thread.submit(time.sleep, 0.1)
    writer.add(random_samples(1)[0])
    index = parse_index(memoryview(writer.finish("made from")), source="an index", remedy="")
    content = (folder / writer.name).read_bytes()
    assert index.facts.sha256 == hashlib.sha256(content).hexdigest()
    assert len(content) % tarfile.RECORDSIZE == 0 and not any(content[-2 * tarfile.BLOCKSIZE :])  # a tar's end


def test_what_waits_to_be_written_is_limited_and_a_full_disk_ends_the_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MOST_WAITING", 1000)
    writer = ShardWriter(LocalFolder(tmp_path), 0)
    for sample in random_samples(3):
        writer.thread.submit(time.sleep, 0.01)
        writer.add(sample)
        assert writer.size - writer.written <= 1000

    def full(data: bytes) -> int:
        raise InputError("the disk is full")

    monkeypatch.setattr(writer.pending, "write", full)
    with pytest.raises(InputError, match="the disk is full"):
        writer.add(random_samples(1)[0])
        writer.finish("made from")
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_shard_and_a_missing_one_are_named_and_refused(tmp_path):
    store, path = one_shard(tmp_path, random_samples(4))
    os.truncate(path, path.stat().st_size - 700)
    with pytest.raises(InputError, match=r"shard-000000-\w+\.tar holds .* refused"):
        store.read(store.samples[0])
    path.unlink()
    with pytest.raises(InputError, match=r"shard-000000-\w+\.tar is missing"):
        store.read(store.samples[0])


@pytest.mark.parametrize("change", [{"offset": 10**9}, {"size": 100}, {"size": 0}, {"answer_tokens": 1}])
def test_an_index_that_does_not_fit_its_shard_is_refused(tmp_path, change):
    store, _ = one_shard(tmp_path, random_samples(4))
    ref = store.samples[1]
    with pytest.raises(InputError, match=r"(cannot be read at|does not hold what .* says of) sample p1#0"):
        store.read(replace(ref, entry=replace(ref.entry, **change)))
