"""The storage interface: local folders and buckets behave the same."""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from object_stores import new_folder, running_store
from stores import assert_same_samples, open_store, random_samples, save_store, write_store

from eagle3.errors import InputError
from eagle3.features.shards import ShardWriter
from eagle3.features.store import FeatureStore
from eagle3.storage.folder import LocalFolder, Storage, open_folder, write_file


@pytest.fixture(scope="module", params=["local", "no links", "s3", "gs"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with running_store(request.param) if request.param in ("s3", "gs") else nullcontext():
        yield request.param


def without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this a file system that refuses hard links, as exFAT, SMB mounts and gcsfuse do."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


@pytest.fixture
def folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    if kind == "no links":
        without_hard_links(monkeypatch)
    in_bucket = kind in ("s3", "gs")
    opened = open_folder(new_folder(kind) if in_bucket else tmp_path, setting="data.path")
    assert isinstance(opened, LocalFolder) is not in_bucket
    return opened


def test_a_file_that_is_cut_under_its_reader_is_an_error_and_no_bus_error(tmp_path):
    folder = LocalFolder(tmp_path)
    write_file(folder, "a.bin", bytes(10_000))
    write_file(folder, "b.bin", b"old content")
    assert len(folder.read("a.bin")) == 10_000 and bytes(folder.read("b.bin", 0, 3)) == b"old"
    os.truncate(tmp_path / "a.bin", 5000)
    with pytest.raises(InputError, match=r"a\.bin was cut from 10000 to 5000 bytes"):
        folder.read("a.bin", 0, 10)
    (tmp_path / "shorter").write_bytes(b"new")
    (tmp_path / "shorter").replace(tmp_path / "b.bin")  # another file of that name leaves the mapped one whole
    assert bytes(folder.read("b.bin")) == b"old content"
    (tmp_path / "b.bin").unlink()
    assert bytes(folder.read("b.bin")) == b"old content"


def test_a_file_that_cannot_be_opened_is_an_error_of_the_system_with_its_name(tmp_path):
    (tmp_path / "a folder").mkdir()
    with pytest.raises(OSError) as caught:
        LocalFolder(tmp_path).read("a folder")
    assert caught.value.filename == str(tmp_path / "a folder")


def test_a_file_is_there_whole_or_not_at_all(folder):
    dropped = folder.create("a.bin")
    assert (dropped.write(b"half"), folder.names("*")) == (4, [])
    dropped.discard()
    assert folder.names("*") == []
    for ask in (folder.size, folder.read):
        with pytest.raises(FileNotFoundError) as missing:
            ask("a.bin")
        assert missing.value.filename is not None and str(missing.value.filename).endswith("a.bin")
    write_file(folder, "a.bin", b"0123456789")
    write_file(folder, "b.txt", b"")
    assert (folder.names("*"), folder.names("*.bin")) == (["a.bin", "b.txt"], ["a.bin"])
    assert (folder.size("a.bin"), folder.size("b.txt"), bytes(folder.read("b.txt"))) == (10, 0, b"")
    ranges = {(): b"0123456789", (3,): b"3456789", (3, 5): b"34", (8, 12): b"89"}  # as far as there are bytes
    assert {cut: bytes(folder.read("a.bin", *cut)) for cut in ranges} == ranges


def test_a_new_file_replaces_the_old_one_of_its_name(folder):
    write_file(folder, "a.bin", b"old")
    read = folder.read("a.bin")
    pending = folder.create("a.bin")
    pending.write(b"newer")
    assert bytes(folder.read("a.bin")) == b"old"
    pending.commit()
    pending.discard()  # does nothing any more
    assert (bytes(folder.read("a.bin")), folder.size("a.bin"), bytes(read)) == (b"newer", 5, b"old")
    for _ in range(2):
        folder.delete("a.bin")
        assert folder.names("*") == [] and folder.version("a.bin") is None
    with pytest.raises(FileNotFoundError):
        folder.read("a.bin")


def test_a_file_that_is_to_replace_a_version_replaces_no_other(folder):
    write_file(folder, "a.bin", b"first", instead_of=None)
    seen = folder.version("a.bin")
    assert seen is not None and seen == folder.version("a.bin")
    with pytest.raises(FileExistsError):
        write_file(folder, "a.bin", bytes(10_000_000), instead_of=None)  # more than one part of an upload
    write_file(folder, "a.bin", b"third", instead_of=seen)
    assert bytes(folder.read("a.bin")) == b"third" and folder.version("a.bin") != seen
    with pytest.raises(FileExistsError):
        write_file(folder, "a.bin", b"fourth", instead_of=seen)
    assert (bytes(folder.read("a.bin")), folder.names("*")) == (b"third", ["a.bin"])


def test_a_store_is_the_same_in_any_folder_and_a_writer_that_comes_too_late_damages_nothing(folder, tmp_path_factory):
    samples, path = random_samples(40), tmp_path_factory.mktemp("store")
    late = ShardWriter(folder, 0)
    late.add(samples[-1])
    save_store(folder, samples)
    before = {name: bytes(folder.read(name)) for name in folder.names("*")}
    with pytest.raises(FileExistsError, match=r"another process has written it.*shard-000000\.index"):
        late.finish("made from")
    assert before == {name: bytes(folder.read(name)) for name in folder.names("*")}
    on_disk, other = open_store(write_store(path, samples)), FeatureStore(folder)
    assert len(other.manifest.shards) > 1
    assert other.fingerprint == on_disk.fingerprint and other.location == folder.location
    other.verify()
    assert torch.equal(other.target_weights()[0], on_disk.target_weights()[0])
    assert_same_samples(other, on_disk, tolerance=0)


@pytest.mark.parametrize("links", [True, False])
def test_of_writers_that_commit_a_new_file_at_once_exactly_one_does(tmp_path, monkeypatch, links):
    if not links:
        without_hard_links(monkeypatch)
    files = [LocalFolder(tmp_path).create("new.bin", instead_of=None) for _ in range(8)]
    for number, file in enumerate(files):
        file.write(bytes([number]) * 100)
    all_have_looked, won = threading.Barrier(len(files)), []

    def commit(number: int) -> None:
        files[number].check = all_have_looked.wait
        try:
            files[number].commit()
            won.append(number)
        except FileExistsError as error:
            assert error.filename == str(tmp_path / "new.bin")
        finally:
            files[number].discard()

    with ThreadPoolExecutor(len(files)) as writers:
        list(writers.map(commit, range(len(files))))
    assert len(won) == 1 and (tmp_path / "new.bin").read_bytes() == bytes([won[0]]) * 100
    assert LocalFolder(tmp_path).names("*") == ["new.bin"] and not [*tmp_path.glob("*.tmp")]
