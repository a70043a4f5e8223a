"""Shards on disk: what is written is read back, by us and by webdataset; damage is named and refused."""

import gc
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import webdataset
from safetensors.torch import load
from stores import MADE_FROM, in_float32, open_store, random_sample, random_samples, write_store

import eagle3.features.index
from eagle3.errors import InputError
from eagle3.features.index import SampleEntry, ShardIndex, parse_index
from eagle3.features.manifest import ShardEntry, sha256_of
from eagle3.features.sample import Sample, ids_from_bytes
from eagle3.features.shards import ShardWriter, decode, require_shard
from eagle3.storage.folder import LocalFolder


def write(directory: Path, samples: list[Sample]) -> tuple[Path, ShardIndex]:
    writer = ShardWriter(LocalFolder(directory), 0)
    for sample in samples:
        writer.add(sample)
    index = parse_index(memoryview(writer.finish("made from")), source="new", remedy="")
    return directory / writer.name, index


def entries_of(index: ShardIndex) -> list[SampleEntry]:
    return [index.entry(number) for number in range(len(index))]


class Reader:
    """Reads the samples of one shard, whose file is mapped once."""

    def __init__(self, path: Path, index: ShardIndex) -> None:
        self.storage, self.path = LocalFolder(path.parent), path
        shard = ShardEntry(path.name, index.facts.bytes, index.facts.sha256, len(index), sha256_of(index))
        require_shard(self.storage, shard)

    def read(self, entry: SampleEntry) -> Sample:
        content = self.storage.read(self.path.name, entry.offset, entry.offset + entry.size)
        return decode(content, entry, path=str(self.path), teachers=MADE_FROM.teachers)


def assert_same(one: Sample, other: Sample) -> None:
    assert one.id == other.id
    for name in ("input_ids", "turns", "aux_hidden_states", "last_hidden_state", "teacher_argmax", "has_teacher"):
        left, right = getattr(one, name), getattr(other, name)
        assert torch.equal(left.to(right.dtype), right), name


def test_a_sample_read_back_is_the_one_written(tmp_path: Path) -> None:
    samples = random_samples(9)
    path, index = write(tmp_path, samples)
    shard = Reader(path, index)
    for sample, entry in zip(samples, entries_of(index), strict=True):
        assert_same(shard.read(entry), sample)
        assert entry.tokens == len(sample.input_ids)
        assert entry.answer_tokens == int((sample.turns > 0).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_samples_are_read_without_a_copy_and_writing_to_one_leaves_the_file_alone(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    samples = [
        replace(
            sample,
            aux_hidden_states=sample.aux_hidden_states.to(dtype),
            last_hidden_state=sample.last_hidden_state.to(dtype),
        )
        for sample in random_samples(3)
    ]
    path, index = write(tmp_path, samples)
    content, shard = path.read_bytes(), Reader(path, index)
    entries = entries_of(index)
    read = [shard.read(entry) for entry in entries]
    for sample, one in zip(samples, read, strict=True):
        assert one.aux_hidden_states.dtype == one.last_hidden_state.dtype == dtype
        assert_same(one, sample)
    read[1].aux_hidden_states.fill_(7)
    assert (shard.read(entries[1]).aux_hidden_states == 7).all()  # the same memory
    assert_same(shard.read(entries[0]), samples[0])
    assert path.read_bytes() == content
    assert_same(Reader(path, index).read(entries[1]), samples[1])


def test_a_sample_without_teachers_is_read(tmp_path: Path) -> None:
    sample = random_sample([0, 0, 1])
    sample = in_float32(sample)
    path, index = write(tmp_path, [sample])
    assert_same(Reader(path, index).read(entries_of(index)[0]), sample)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves the file open
def test_webdataset_reads_our_shards(tmp_path: Path) -> None:
    samples = random_samples(5)
    path, _ = write(tmp_path, samples)
    dataset = webdataset.WebDataset(str(path), shardshuffle=False)
    read = [load(item["safetensors"]) for item in dataset]
    assert len(read) == len(samples)
    for tensors, sample in zip(read, samples, strict=True):
        assert torch.equal(tensors["aux_hidden_states"], sample.aux_hidden_states)
        assert ids_from_bytes(tensors["input_ids"].numpy()).tolist() == sample.input_ids.tolist()
    del dataset
    gc.collect()  # while its warning is still ignored


def test_no_padding_and_no_pickle_is_stored(tmp_path: Path) -> None:
    samples = random_samples(3)
    path, index = write(tmp_path, samples)
    for sample, entry in zip(samples, entries_of(index), strict=True):
        values = (
            sum(t.numel() * t.element_size() for t in (sample.aux_hidden_states, sample.last_hidden_state))
            + sample.input_ids.numel() * 6
        )
        assert entry.size < values + len(sample.teacher_argmax) * 4 + 700  # and the safetensors header
    assert b"pickle" not in path.read_bytes()


def test_nothing_appears_under_the_shards_name_before_it_is_whole(tmp_path: Path) -> None:
    writer = ShardWriter(LocalFolder(tmp_path), 0)
    writer.add(random_samples(1)[0])
    assert list(tmp_path.glob("shard-*")) == []
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_shard_and_a_missing_one_are_named_and_refused(tmp_path: Path) -> None:
    path, index = write(tmp_path, random_samples(4))
    os.truncate(path, index.facts.bytes - 700)
    with pytest.raises(InputError, match=r"shard-000000-\w+\.tar holds .* refused"):
        Reader(path, index)
    path.unlink()
    with pytest.raises(InputError, match=r"shard-000000-\w+\.tar is missing"):
        Reader(path, index)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        (rb'"F32"', b'"F99"'),  # no such type
        (rb'"F32"', b'"F16"'),  # another one
        (rb'"turns"', b'"truns"'),  # a tensor missing
        (rb'"shape": \[\d', b'"shape": [0'),
        (rb'"shape": \[', b'"shape": {'),
        (rb'"data_offsets": \[\d', b'"data_offsets": [9'),  # a gap or an overlap
        (rb'"data_offsets": \[(\d+), \d', rb'"data_offsets": [\1, 9'),  # beyond the sample
        (rb'"data_offsets": \[\d', b'"data_offsets": [-'),
        (rb'"data_offsets":', b'"data_offset_":'),
        (rb'"__metadata__": \{', b'"__metadata__": ['),
        (rb"(?s)^.{40}", b"\xff" * 40),  # its length and its beginning
        *((rb"(?s)^.{8}", size.to_bytes(8, "little")) for size in (0, 7, 2**40, 2**63)),
    ],
)
def test_a_header_that_does_not_fit_its_data_is_refused(tmp_path: Path, pattern: bytes, damage: bytes) -> None:
    path, index = write(tmp_path, random_samples(4))
    entry = entries_of(index)[1]
    content = path.read_bytes()
    before, sample = content[: entry.offset], content[entry.offset :]
    damaged, count = re.subn(pattern, damage, sample, count=1)
    assert count == 1 and len(damaged) == len(sample)
    path.write_bytes(before + damaged)
    with pytest.raises(InputError, match=r"cannot be read at sample p1#0"):
        Reader(path, index).read(entry)


@pytest.mark.parametrize("change", [{"offset": 10**9}, {"size": 100}, {"size": 10**9}, {"size": 0}])
def test_an_index_that_does_not_fit_its_shard_is_refused(tmp_path: Path, change: dict) -> None:
    path, index = write(tmp_path, random_samples(4))
    entry = replace(entries_of(index)[1], **change)
    with pytest.raises(InputError, match=r"cannot be read at sample p1#0"):
        Reader(path, index).read(entry)


def test_reading_samples_decodes_the_names_of_their_sources_once_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, decoded = open_store(write_store(tmp_path, random_samples(40), shard_bytes=10**9)), []
    monkeypatch.setattr(eagle3.features.index, "_texts", lambda *given: decoded.append(given) or [""])
    assert {ref.entry.source for ref in store.samples} == {""} and len(store.samples) == 40
    assert len(decoded) == 1
