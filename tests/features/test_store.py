"""The feature store: manifest, counts, target weights."""

import random
import re
import shutil
from collections import Counter

import pytest
from exported_head import edit_json
from stores import open_store, random_samples, shard_path, write_store

from eagle3.errors import InputError


def test_the_manifest_counts_what_the_shards_hold(store_path):
    store = open_store(store_path)
    samples = [store.read(ref) for ref in store.samples]
    assert len(store.manifest.shards) > 1
    assert store.manifest.samples == len(samples) == 60
    assert store.manifest.tokens == sum(len(sample.input_ids) for sample in samples)
    counted = Counter(token for sample in samples for token in sample.input_ids[sample.turns > 0].tolist())
    assert store.answer_counts.tolist() == [counted[token] for token in range(len(store.answer_counts))]
    assert store.manifest.answer_tokens == sum(counted.values())


def test_no_flipped_byte_passes_in_any_file(store_path):
    drawn = random.Random(0)
    files = sorted(store_path.iterdir())
    assert len({path.suffix for path in files}) == 4
    for number in range(60):
        path = files[number % len(files)]
        whole = path.read_bytes()
        place = drawn.randrange(len(whole))
        flipped = bytes([whole[place] ^ 1 << drawn.randrange(8)])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(InputError, match=re.escape(path.name.removesuffix(".index"))):
            open_store(store_path).verify()
            open_store(store_path).target_weights()
        path.write_bytes(whole)
    open_store(store_path).verify()


@pytest.mark.parametrize("with_tar", [False, True])
def test_a_shard_of_another_store_is_refused(store_path, tmp_path, with_tar):
    """Made from the same settings, by the same program, sealed and whole: but not the one of this manifest."""
    other = write_store(tmp_path / "other", random_samples(80)[20:])
    ours, theirs = shard_path(store_path, 1), shard_path(other, 1)
    if with_tar:
        shutil.copy(theirs, store_path)
        ours.unlink()
    shutil.copy(other / "shard-000001.index", store_path)
    with pytest.raises(InputError, match=r"shard-000001\.index is damaged or does not belong to manifest\.json"):
        open_store(store_path)


@pytest.mark.parametrize("name", ["manifest.json", "shard-000000.index", "train"])
def test_a_place_in_a_store_is_told_the_store(store_path, name):
    with pytest.raises(InputError, match=f"{name} is no feature store, {store_path} is one; give that"):
        open_store(store_path / name)


def test_a_store_of_another_format_is_refused(store_path):
    edit_json(store_path / "manifest.json", format_version=99)
    with pytest.raises(InputError, match="format_version=99"):
        open_store(store_path)


def test_the_fingerprint_changes_with_content_and_with_origin(tmp_path):
    one = open_store(write_store(tmp_path / "a", random_samples(5))).fingerprint
    same = open_store(write_store(tmp_path / "b", random_samples(5))).fingerprint
    content = open_store(write_store(tmp_path / "c", random_samples(6))).fingerprint
    origin = open_store(write_store(tmp_path / "d", random_samples(5), capture_layers=[1, 2, 3])).fingerprint
    assert one == same
    assert len({one, content, origin}) == 3
