"""Shards on disk: what is written is read back, by us and by webdataset; damage is named and refused."""

import gc
import os
from pathlib import Path

import pytest
import torch
import webdataset
from conftest import MADE_FROM, random_samples
from safetensors.torch import load

from eagle3.errors import InputError
from eagle3.features.sample import Sample
from eagle3.features.shards import SampleEntry, ShardReader, ShardWriter, verify_file


def write(directory: Path, samples: list[Sample]) -> tuple[Path, dict]:
    writer = ShardWriter(directory, 0, first_sample=0)
    for sample in samples:
        writer.add(sample)
    return directory / "shard-000000.tar", writer.finish("made from")


def reader(path: Path, index: dict) -> ShardReader:
    return ShardReader(path, expected_bytes=index["bytes"], stored_teacher_rows=str(MADE_FROM["teacher_rows"]))


def assert_same(one: Sample, other: Sample) -> None:
    assert one.id == other.id
    for name in ("input_ids", "turns", "aux", "last", "argmax", "logsumexp", "teacher_rows"):
        left, right = getattr(one, name), getattr(other, name)
        assert torch.equal(left.to(right.dtype), right), name


def test_a_sample_read_back_is_the_one_written(tmp_path: Path) -> None:
    samples = random_samples(9)
    path, index = write(tmp_path, samples)
    shard = reader(path, index)
    for sample, entry in zip(samples, index["samples"], strict=True):
        assert_same(shard.read(SampleEntry(**entry)), sample)
        assert entry["tokens"] == len(sample.input_ids)
        assert entry["answer_tokens"] == int((sample.turns > 0).sum())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves the file open
def test_webdataset_reads_our_shards(tmp_path: Path) -> None:
    samples = random_samples(5)
    path, _ = write(tmp_path, samples)
    dataset = webdataset.WebDataset(str(path), shardshuffle=False)
    read = [load(item["safetensors"]) for item in dataset]
    assert len(read) == len(samples)
    for tensors, sample in zip(read, samples, strict=True):
        assert torch.equal(tensors["aux"], sample.aux)
        assert torch.equal(tensors["input_ids"].long(), sample.input_ids)
    del dataset
    gc.collect()  # while its warning is still ignored


def test_no_padding_and_no_pickle_is_stored(tmp_path: Path) -> None:
    samples = random_samples(3)
    path, index = write(tmp_path, samples)
    for sample, entry in zip(samples, index["samples"], strict=True):
        values = sum(t.numel() * t.element_size() for t in (sample.aux, sample.last)) + sample.input_ids.numel() * 6
        assert entry["size"] < values + len(sample.argmax) * 8 + 700  # and the safetensors header
    assert b"pickle" not in path.read_bytes()


def test_nothing_appears_under_the_shards_name_before_it_is_whole(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, 0, first_sample=0)
    writer.add(random_samples(1)[0])
    assert list(tmp_path.glob("shard-*")) == []
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_shard_is_named_and_refused(tmp_path: Path) -> None:
    path, index = write(tmp_path, random_samples(4))
    os.truncate(path, index["bytes"] - 700)
    with pytest.raises(InputError, match=r"shard-000000\.tar holds .* refused"):
        reader(path, index)


def test_a_corrupted_shard_is_named_and_refused(tmp_path: Path) -> None:
    path, index = write(tmp_path, random_samples(4))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"shard-000000\.tar has sha256 .* refused"):
        verify_file(path, index["sha256"])


def test_a_damaged_sample_header_is_named_and_refused(tmp_path: Path) -> None:
    path, index = write(tmp_path, random_samples(4))
    entry = SampleEntry(**index["samples"][1])
    content = bytearray(path.read_bytes())
    content[entry.offset : entry.offset + 40] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read at sample p1#0"):
        reader(path, index).read(entry)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path, index = write(tmp_path, random_samples(1))
    path.unlink()
    with pytest.raises(InputError, match=r"shard-000000\.tar is missing"):
        reader(path, index)
