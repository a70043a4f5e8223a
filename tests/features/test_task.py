"""Shards by several writers: the first of one number stays, and a store is the same whatever was left behind."""

from pathlib import Path

import pytest
import torch
from stores import MADE_FROM, in_float32, random_sample, random_samples

from eagle3.errors import InputError
from eagle3.features.conversation import Conversation, SampleSizer, WorkUnit, work_units
from eagle3.features.index import parse_index
from eagle3.features.sample import Sample
from eagle3.features.shards import encode, hash_made_from
from eagle3.features.task import Shard
from eagle3.storage.folder import LocalFolder

SIZER = SampleSizer(layers=3, hidden_size=16, dtype=torch.float32, teachers="answers")


def new_shard(folder: Path, samples: list[Sample], *, made_from: str = "the same") -> Shard:
    unit = WorkUnit(made_from, [Conversation(each.id, each.input_ids, each.turns) for each in samples])
    shard = Shard(LocalFolder(folder), 0, unit)
    for sample in samples:
        shard.add(encode(sample))
    return shard


def test_of_two_writers_of_a_piece_the_first_stays_and_both_tell_of_it(tmp_path, caplog):
    samples = random_samples(5)
    first, second = new_shard(tmp_path, samples), new_shard(tmp_path, samples)
    told = first.finish()
    assert told is not None and second.finish() == told
    assert "exists already, from another worker or run: it is kept" in caplog.text
    [tar] = tmp_path.glob("*.tar")
    assert parse_index(memoryview(told), source="", remedy="").facts.shard == tar.name
    assert sorted(path.name for path in tmp_path.iterdir()) == [tar.name, "shard-000000.index"]


@pytest.mark.parametrize("change", ["settings", "samples"])
def test_a_shard_of_another_piece_or_run_ends_the_writer(tmp_path, change):
    samples = random_samples(5)
    new_shard(tmp_path, samples).finish()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    others = random_samples(9)[5:] if change == "samples" else samples
    late = new_shard(tmp_path, others, made_from="others" if change == "settings" else "the same")
    with pytest.raises(InputError, match=r"shard-000000\.index has been written by another process"):
        late.finish()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_pieces_end_where_a_shard_is_full_and_take_the_free_numbers():
    samples = [in_float32(random_sample([0, 0, 1, 1, 1], seed=n, sample_id=f"p{n}#0")) for n in range(10)]
    conversations = [Conversation(each.id, each.input_ids, each.turns) for each in samples]
    one = SIZER(conversations[0])
    assert one <= 512 * (1 + -(-encode(samples[0]).size // 512)) < one + 2048
    cut = list(
        work_units(
            iter(conversations), taken={0, 2}, made_from=hash_made_from(MADE_FROM), sizer=SIZER, shard_bytes=3 * one
        )
    )
    assert [number for number, _ in cut] == [1, 3, 4, 5]
    assert [[item.id for item in unit.conversations] for _, unit in cut] == [
        [f"p{n}#0" for n in some] for some in ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9,))
    ]
