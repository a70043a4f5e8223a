"""The door for where shards lie: a folder in memory, which lives in tests alone, keeps the promises of a local one."""

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import open_store, random_samples, save_store

from eagle3.errors import InputError
from eagle3.features.store import FeatureStore
from eagle3.storage.folder import LocalFolder, Storage, write_file


class InMemory:
    """A `Storage` that writes nothing to disk."""

    location = "memory://store"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def names(self, pattern: str) -> list[str]:
        return sorted(fnmatch.filter(self.files, pattern))

    def size(self, name: str) -> int:
        return len(self._content(name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        return memoryview(bytearray(self._content(name)))[start:stop]

    def create(self, name: str) -> "PendingBytes":
        return PendingBytes(self.files, name)

    def _content(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(2, "no such file", f"{self.location}/{name}")
        return self.files[name]


class PendingBytes:
    def __init__(self, files: dict[str, bytes], name: str) -> None:
        self.files, self.name, self.content = files, name, bytearray()

    def write(self, data: Any) -> int:
        self.content += data
        return len(data)

    def tell(self) -> int:
        return len(self.content)

    def commit(self) -> None:
        self.files[self.name] = bytes(self.content)

    def discard(self) -> None:
        pass


@pytest.fixture(params=[LocalFolder, InMemory])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    make: Callable[..., Storage] = request.param
    return make(tmp_path) if make is LocalFolder else make()


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
    assert set(memory.files) == {path.name for path in tmp_path.iterdir()}
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
