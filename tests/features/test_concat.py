"""Several stores as one: the union of their samples, and only of stores that go together."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exported_head import FINGERPRINT, make_origin
from stores import IDENTITY, TARGET_CONFIG, flip_a_bit, grow_store, open_store, random_samples, shard_path, write_store

from eagle3.errors import InputError
from eagle3.features.concat import open_recorded, open_source
from eagle3.serving.check.prompts import validation_prompts
from eagle3.storage.files import sha256_json


def test_the_samples_and_numbers_are_those_of_all_stores(two_stores):
    joined, parts = open_source(two_stores), [open_store(Path(path)) for path in two_stores]
    own = [part.read(ref) for part in parts for ref in part.samples]
    assert len(joined.samples) == len(own) == 60
    for ref, sample in zip(joined.samples, own, strict=True):
        for name, value in vars(joined.read(ref)).items():
            expected = getattr(sample, name)
            assert torch.equal(value, expected) if torch.is_tensor(value) else value == expected, name
    assert torch.equal(joined.answer_counts, parts[0].answer_counts + parts[1].answer_counts)
    assert not torch.equal(parts[0].answer_counts, parts[1].answer_counts)
    for key, total in joined.describe().items():
        assert key == "stores" or total == sum(getattr(part.manifest, key) for part in parts)
    assert torch.equal(joined.target_weights()[1], parts[0].target_weights()[1])


def test_a_cache_in_a_bucket_is_refused_with_the_key():
    with pytest.raises(InputError, match="s3://bucket/cache is a URL, and must be a local folder"):
        open_source("DIR/features", cache_dir="s3://bucket/cache")


def test_answers_sampled_and_features_computed_in_other_ways_go_together_and_each_is_recorded(tmp_path):
    dtypes = ("float32", "bfloat16")
    ways = [{"responses": {"seed": seed}, "target_dtype": dtype} for seed, dtype in enumerate(dtypes)]
    paths = [str(write_store(tmp_path / str(place), random_samples(5), **way)) for place, way in enumerate(ways)]
    assert [{key: each[key] for key in ways[0]} for each in open_source(paths).describe()["stores"]] == ways


def test_the_fingerprint_is_that_of_all_stores_in_order_and_one_stays_what_it_is(two_stores):
    one, other = (open_store(Path(path)).fingerprint for path in two_stores)
    assert open_source(two_stores[0]).fingerprint == open_source(two_stores[:1]).fingerprint == one
    assert open_source(two_stores).fingerprint == sha256_json([one, other])
    assert open_source(two_stores[::-1]).fingerprint == sha256_json([other, one])


def test_ranks_share_the_verification_of_every_store(two_stores):
    shard = shard_path(Path(two_stores[1]), 1)
    flip_a_bit(shard, 1000)
    open_source(two_stores).verify(rank=0, world_size=2)
    with pytest.raises(InputError, match=str(shard)):
        open_source(two_stores).verify(rank=1, world_size=2)


@pytest.mark.parametrize(
    ("made_from", "difference"),
    [
        ({"target": replace(IDENTITY, weights_hash="x")}, "they differ in weights"),
        ({"capture_layers": [1, 2, 3]}, r"capture_layers: \[2, 4, 5\] and \[1, 2, 3\]"),
        ({"dtype": "float16"}, "dtype: float64 and float16"),
        ({"reasoning_ids": [[1], [2]]}, r"reasoning_ids: None and \[\[1\], \[2\]\]"),
    ],
)
def test_stores_that_do_not_go_together_are_named_with_what_differs(tmp_path, made_from, difference):
    paths = [str(write_store(tmp_path / "a", random_samples(3)))]
    paths += [str(write_store(tmp_path / "b", random_samples(3), **made_from))]
    with pytest.raises(InputError, match=difference) as refused:
        open_source(paths)
    assert all(path in str(refused.value) for path in paths)


def test_the_same_store_twice_is_refused_under_any_name(two_stores, tmp_path):
    (tmp_path / "link").symlink_to(two_stores[0])
    for name in (two_stores[0], f"{tmp_path}/b/../a", f"{tmp_path}/link"):
        with pytest.raises(InputError, match="names the same features twice") as refused:
            open_source([*two_stores, name])
        assert f"{two_stores[0]} and {name};" in str(refused.value)


def test_validation_prompts_of_two_stores_are_each_prompt_once(two_stores):
    def prompts(path: str | list[str]) -> list[list[int]]:
        store = make_origin(FINGERPRINT, TARGET_CONFIG, path=path, hash=open_source(path).fingerprint, val_fraction=0.5)
        return validation_prompts(store, turns="all", limit=None, max_length=99).prompts

    assert prompts(open_source(two_stores).location) == prompts(two_stores[0])


def test_shards_of_another_store_that_were_copied_into_a_folder_are_counted(two_stores, caplog):
    open_source(two_stores)
    assert not caplog.text
    for shard in (a_shard := shard_path(Path(two_stores[1]), 0)), a_shard.with_name("shard-000000 (1).tar"):
        shutil.copy(a_shard, Path(two_stores[0], shard.name))
    assert len(open_source(two_stores[0]).samples) == 30
    assert f"1 shards there are not in its manifest.json and are not used, e.g. {a_shard.name}: " in caplog.text


def test_only_a_store_that_holds_the_recorded_one_is_opened_as_it_was(tmp_path, caplog):
    path = write_store(tmp_path / "store", random_samples(8))
    before = open_source(str(path))
    shards = before.samples.shards_by_store()
    grow_store(path, random_samples(11)[8:])
    again = open_recorded(str(path), before.fingerprint, shards)
    assert again.fingerprint == before.fingerprint and len(again.samples) == again.describe()["samples"] == 8
    assert torch.equal(again.answer_counts, before.answer_counts)
    assert "has 3 samples more than the 8 " in caplog.text
    caplog.clear()
    for hash, counts in ((before.fingerprint, None), ("another", shards), (before.fingerprint, [*shards, 1])):
        assert len(open_recorded(str(path), hash, counts).samples) == 11
    assert not caplog.text
