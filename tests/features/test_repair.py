"""What is damaged is named, and nothing else is."""

import json
import random
import shutil
from pathlib import Path

import pytest
from stores import open_store, random_samples, shard_of, write_store

from eagle3.errors import InputError
from eagle3.features.repair import find_damage, take_away
from eagle3.storage.folder import LocalFolder


def test_a_whole_store_has_no_damage(store_path: Path) -> None:
    assert find_damage(LocalFolder(store_path)) == ({}, [])


def test_a_flipped_byte_of_any_file_is_found_in_that_file(store_path: Path) -> None:
    drawn = random.Random(0)
    for path in sorted(store_path.iterdir()) * 3:
        whole = path.read_bytes()
        place = drawn.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << drawn.randrange(8)]) + whole[place + 1 :])
        damage, _ = find_damage(LocalFolder(store_path))
        assert list(damage) == [path.name]
        path.write_bytes(whole)


def test_missing_truncated_and_foreign_shards_are_told_apart(store_path: Path, tmp_path: Path) -> None:
    missing, short = (shard_of(store_path, number) for number in range(2))
    missing.unlink()
    with short.open("r+b") as file:
        file.truncate(5000)
    (store_path / "shard-000002.index").unlink()
    shutil.copy(shard_of(store_path, 3), store_path / "shard-000099-0123abcd.tar")
    damage, foreign = find_damage(LocalFolder(store_path))
    assert list(damage) == [missing.name, short.name, "shard-000002.index"]
    assert foreign == ["shard-000099-0123abcd.tar"]
    others = {path.name for path in store_path.iterdir() if path.name[6:12] not in ("000000", "000001", "000002")}
    take_away(LocalFolder(store_path), damage)
    assert {path.name for path in store_path.iterdir()} == others  # what is not damaged stays, the foreign one too


def test_without_a_manifest_each_shard_is_held_against_its_own_index(tmp_path: Path) -> None:
    path = write_store(tmp_path, random_samples(40))
    (path / "manifest.json").write_text("{")
    shard = shard_of(path, 0)
    shard.write_bytes(b"")
    assert list(find_damage(LocalFolder(path))[0]) == ["manifest.json", shard.name]


def test_what_a_newer_version_wrote_is_no_damage(store_path: Path) -> None:
    manifest = json.loads((store_path / "manifest.json").read_text())
    (store_path / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(InputError, match="format_version=99"):
        find_damage(LocalFolder(store_path))
    assert len(list(store_path.glob("shard-*.tar"))) > 3


def test_a_store_that_is_open_elsewhere_is_read_as_it_was(store_path: Path) -> None:
    store = open_store(store_path)
    take_away(LocalFolder(store_path), {shard_of(store_path, 0).name: "for the test"})
    with pytest.raises(InputError, match=r"shard-000000-\w+\.tar is missing"):
        store.read(store.samples[0])
