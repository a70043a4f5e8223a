"""The door for where shards lie: a bucket, and a folder in memory (of the tests), keep the promises of a local one."""

import errno
import fnmatch
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gcs_server import gcs_server
from object_stores import azure_server, new_folder, s3_server
from stores import open_store, random_samples, save_store

from eagle3.errors import InputError
from eagle3.features.shards import ShardWriter
from eagle3.features.store import FeatureStore
from eagle3.storage.folder import WHATEVER, LocalFolder, Storage, write_file
from eagle3.storage.resolve import open_folder


class InMemory:
    """A `Storage` that writes nothing to disk."""

    location = "memory://store"
    remote = False

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def names(self, pattern: str) -> list[str]:
        return sorted(fnmatch.filter(self.files, pattern))

    def size(self, name: str) -> int:
        return len(self._content(name))

    def version(self, name: str) -> str | None:
        return hashlib.sha256(self.files[name]).hexdigest() if name in self.files else None

    def read(self, name: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> memoryview:
        return memoryview(bytearray(self._content(name)))[start:stop]

    def delete(self, name: str) -> None:
        self.files.pop(name, None)

    def create(self, name: str, *, instead_of: str | None = WHATEVER) -> "PendingBytes":
        return PendingBytes(self, name, instead_of)

    def _content(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(2, "no such file", f"{self.location}/{name}")
        return self.files[name]


class PendingBytes:
    def __init__(self, folder: InMemory, name: str, instead_of: str | None) -> None:
        self.folder, self.name, self.instead_of, self.content = folder, name, instead_of, bytearray()

    def write(self, data: Any) -> int:
        self.content += data
        return len(data)

    def tell(self) -> int:
        return len(self.content)

    def commit(self) -> None:
        if self.instead_of not in (WHATEVER, self.folder.version(self.name)):
            raise FileExistsError(17, "another process has written it", self.name)
        self.folder.files[self.name] = bytes(self.content)

    def discard(self) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def azure() -> Iterator[None]:
    if shutil.which("azurite-blob") is None:
        pytest.skip("needs Azurite: npm install -g azurite")
    with azure_server():
        yield


@pytest.fixture(scope="module")
def google() -> Iterator[None]:
    with gcs_server():
        yield


@pytest.fixture(params=["local", "memory", "s3", "gs", "az"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        request.getfixturevalue("server")
        return open_folder(new_folder(), setting="data.path")
    if request.param == "gs":
        request.getfixturevalue("google")
        return open_folder(new_folder("gs"), setting="data.path")
    if request.param == "az":
        request.getfixturevalue("azure")
        return open_folder(new_folder("az"), setting="data.path")
    return InMemory() if request.param == "memory" else open_folder(tmp_path, setting="data.path")


def test_a_file_is_there_whole_or_not_at_all(folder: Storage) -> None:
    dropped = folder.create("a.bin")
    assert (dropped.write(b"half"), dropped.tell(), folder.names("*")) == (4, 4, [])
    dropped.discard()
    assert folder.names("*") == []
    write_file(folder, "a.bin", b"0123456789")
    write_file(folder, "b.txt", b"")
    assert (folder.names("*"), folder.names("*.bin")) == (["a.bin", "b.txt"], ["a.bin"])
    assert (folder.size("a.bin"), folder.size("b.txt"), bytes(folder.read("b.txt"))) == (10, 0, b"")
    assert [bytes(folder.read("a.bin", *cut)) for cut in [(), (3,), (3, 5)]] == [b"0123456789", b"3456789", b"34"]


def test_a_new_file_replaces_the_old_one_of_its_name(folder: Storage) -> None:
    write_file(folder, "a.bin", b"old")
    read = folder.read("a.bin")
    pending = folder.create("a.bin")
    pending.write(b"newer")
    assert bytes(folder.read("a.bin")) == b"old"
    pending.commit()
    pending.discard()  # does nothing any more
    assert (bytes(folder.read("a.bin")), folder.size("a.bin"), bytes(read)) == (b"newer", 5, b"old")


def test_a_file_that_is_to_replace_a_version_replaces_no_other(folder: Storage) -> None:
    assert folder.version("a.bin") is None
    write_file(folder, "a.bin", b"first", instead_of=None)
    seen = folder.version("a.bin")
    assert seen is not None and seen == folder.version("a.bin")
    with pytest.raises(FileExistsError):
        write_file(folder, "a.bin", b"second", instead_of=None)
    write_file(folder, "a.bin", b"third", instead_of=seen)
    assert bytes(folder.read("a.bin")) == b"third" and folder.version("a.bin") != seen
    with pytest.raises(FileExistsError):
        write_file(folder, "a.bin", b"fourth", instead_of=seen)
    assert (bytes(folder.read("a.bin")), folder.names("*")) == (b"third", ["a.bin"])


def test_a_deleted_file_is_gone(folder: Storage) -> None:
    write_file(folder, "a.bin", b"old")
    assert bytes(folder.read("a.bin")) == b"old"
    for _ in range(2):
        folder.delete("a.bin")
        assert folder.names("*") == [] and folder.version("a.bin") is None
    with pytest.raises(FileNotFoundError):
        folder.read("a.bin")


def test_a_range_ends_where_the_file_does(folder: Storage) -> None:
    write_file(folder, "a.bin", b"0123456789")
    assert [bytes(folder.read("a.bin", *cut)) for cut in [(8, 12), (10, 12), (12, 20), (5, 5)]] == [
        b"89",
        b"",
        b"",
        b"",
    ]


def test_a_name_that_is_not_there_is_a_file_not_found(folder: Storage) -> None:
    for ask in (folder.size, folder.read):
        with pytest.raises(FileNotFoundError) as missing:
            ask("none.bin")
        assert missing.value.filename is not None and str(missing.value.filename).endswith("none.bin")


def test_a_feature_store_in_memory_is_that_on_disk(tmp_path: Path) -> None:
    memory, samples = InMemory(), random_samples(40)
    save_store(memory, samples)
    save_store(LocalFolder(tmp_path), samples)
    on_disk, in_memory = open_store(tmp_path), FeatureStore(memory)
    assert {name[:12] for name in memory.files} == {path.name[:12] for path in tmp_path.iterdir()}
    assert len(in_memory.manifest.shards) > 1
    assert in_memory.fingerprint == on_disk.fingerprint
    in_memory.verify()
    for here, there in zip(in_memory.samples, on_disk.samples, strict=True):
        ours, theirs = in_memory.read(here), on_disk.read(there)
        assert torch.equal(ours.aux_hidden_states, theirs.aux_hidden_states), here.entry.id
        assert torch.equal(ours.input_ids, theirs.input_ids), here.entry.id
    shard = in_memory.manifest.shards[0].name
    memory.files[shard] = memory.files[shard][:-1] + b"!"
    with pytest.raises(InputError, match=rf"memory://store/{shard}"):
        FeatureStore(memory).verify()


@pytest.fixture(params=[None, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with hard links, and those that refuse them: exFAT, SMB mounts, gcsfuse."""

    def refuse(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    if request.param is not None:
        monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("links")
def test_of_writers_that_commit_a_new_file_at_once_exactly_one_does(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("links")
def test_a_store_is_written_and_two_writers_collide_with_and_without_hard_links(tmp_path: Path) -> None:
    folder, samples = LocalFolder(tmp_path), random_samples(40)
    late = ShardWriter(folder, 0)
    late.add(samples[-1])
    save_store(folder, samples)
    before = {name: bytes(folder.read(name)) for name in folder.names("*")}
    with pytest.raises(FileExistsError, match=r"another process has written it.*shard-000000\.index"):
        late.finish("made from")
    assert before == {name: bytes(folder.read(name)) for name in folder.names("*")}
    open_store(tmp_path).verify()
