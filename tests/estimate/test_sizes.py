"""Sizes ahead of a run are those of the files that the writer writes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stores import HIDDEN, VOCAB, open_store, random_sample, write_store

from eagle3.answers.rows import ResponseRow
from eagle3.estimate.sizes import Layout, number_of_shards, store_sizes
from eagle3.features.extract import STORED
from eagle3.features.sample import Sample, stored_rows, stored_size, to_bytes

LAYOUT = Layout(hidden_size=HIDDEN, layers=3, max_length=64, too_long="truncate", teachers="answers", shard_mb=0.02)


def in_dtype(sample: Sample, dtype: torch.dtype) -> Sample:
    rows = {
        name: stored_rows(getattr(sample, name), dtype, layers=layers, sample_id="")
        for name, layers in (("aux_hidden_states", 3), ("last_hidden_state", 1))
    }
    return replace(sample, **rows)


def some_rows(count: int, *, longest: int = 60) -> list[ResponseRow]:
    rows = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        prompt, answer = 2 + number % 5, 2 + number * 7 % (longest - 6)
        ids = torch.randint(VOCAB, (prompt + answer,), generator=generator).tolist()
        row = ResponseRow(id=f"p{number}#0", prompt_id=f"p{number}", source="test", license=None, input_ids=ids)
        rows.append(replace(row, turns=[(prompt, prompt + answer)]))
    return rows


def real_sample(layout: Layout, row: ResponseRow, dtype: torch.dtype) -> Sample:
    """What an extractor makes of a row, with random features."""
    ([item], _) = layout.conversations([row])
    drawn = random_sample(item.turns.tolist(), stored=layout.teachers, sample_id=row.id)
    argmax = item.input_ids.roll(-1)[drawn.has_teacher]
    return in_dtype(replace(drawn, input_ids=item.input_ids, teacher_argmax=argmax), dtype)


@pytest.mark.parametrize("dtype", STORED.values())
@pytest.mark.parametrize("teachers", ["answers", "all"])
@pytest.mark.parametrize("length", [3, 5, 17, 300])
def test_the_size_of_a_sample_is_that_of_its_file(dtype: torch.dtype, teachers: str, length: int) -> None:
    sample = random_sample([0] + [1] * length + [0, 2, 2], stored=teachers, sample_id=f"prömpt {length}#0")
    sample = in_dtype(sample, dtype)
    assert stored_size(sample) == len(to_bytes(sample))


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("teachers", ["answers", "all"])
def test_a_whole_store_takes_what_was_said(tmp_path: Path, dtype: str, teachers: str) -> None:
    layout, rows = replace(LAYOUT, teachers=teachers), some_rows(40)
    conversations, left_out = layout.conversations(rows)
    assert not left_out
    size = store_sizes(conversations, 1, layout, target_values=50 * HIDDEN)[dtype]
    samples = [real_sample(layout, row, STORED[dtype]) for row in rows]
    write_store(tmp_path, samples, shard_bytes=int(layout.shard_mb * 2**20), teachers=teachers)
    store = open_store(tmp_path)
    shards = len(store.manifest.shards)
    assert abs(size.shards - shards) <= 0.1 * shards + 1
    # A tar is a whole number of records, of which shards of 20 kB hold two: what half of one says is off by a half.
    assert abs(size.bytes - store.manifest.bytes) <= 10_240 / 2 * shards
    samples_in_blocks = sum(512 * (1 + -(-ref.entry.size // 512)) for ref in store.samples)
    assert samples_in_blocks == sum(map(layout.weight(STORED[dtype]), conversations))


def test_a_share_of_the_conversations_stands_for_all() -> None:
    rows = some_rows(700)
    for dtype in ("bfloat16", "fp8"):
        whole = store_sizes(LAYOUT.conversations(rows)[0], 1, LAYOUT, 0)[dtype]
        part = store_sizes(LAYOUT.conversations(rows[::7])[0], 7, LAYOUT, 0)[dtype]
        assert part.bytes == pytest.approx(whole.bytes, rel=0.02)
        assert part.shards == pytest.approx(whole.shards, rel=0.02)


def test_shards_are_counted_as_a_writer_fills_them() -> None:
    drawn = torch.Generator().manual_seed(0)
    for full in (1e4, 1e5, 1e6):
        members = (torch.rand(5000, generator=drawn) ** 3 * 9000 + 500).int().tolist()
        shards, size = 0, 0
        for member in members:
            size += member
            if size >= full:
                shards, size = shards + 1, 0
        shards += size > 0
        assert number_of_shards(members, 1, full / 2**20) == pytest.approx(shards, rel=0.03, abs=1)


def test_what_the_features_stage_leaves_out_is_left_out() -> None:
    rows = some_rows(40)
    dropped, left_out = replace(LAYOUT, max_length=30, too_long="drop").conversations(rows)
    assert left_out == Counter({"longer than features.max_length=30: drop": 40 - len(dropped)}) and len(dropped) < 40
    cut, _ = replace(LAYOUT, max_length=30).conversations(rows)
    assert len(cut) == 40 and max(len(item.input_ids) for item in cut) == 30


def test_fp8_is_half_of_bfloat16_and_a_cache_has_room_for_all() -> None:
    layout = replace(LAYOUT, hidden_size=4096, shard_mb=512)
    sizes = store_sizes(layout.conversations(some_rows(50))[0], 1e4, layout, 0)
    assert sizes["fp8"].bytes / sizes["bfloat16"].bytes == pytest.approx(0.5, abs=0.01)
    for size in sizes.values():
        assert size.cache_gb * 1e9 * 7 / 8 >= size.bytes > size.cache_gb * 1e9 * 0.8
        assert size.objects == 2 * size.shards + 2
