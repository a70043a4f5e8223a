"""The local cache of a folder that is read over a network."""

import hashlib
import logging
import os
import random
from pathlib import Path

import pytest
import torch
from stores import random_samples, save_store

from eagle3.errors import InputError
from eagle3.features.concat import open_source
from eagle3.features.store import FeatureStore
from eagle3.storage.cache import CachedFolder
from eagle3.storage.folder import LocalFolder, write_file

CONTENT = random.Random(0).randbytes(3_000_000)


class Counted(LocalFolder):
    """A folder that counts what is read from it."""

    remote = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fetched = 0
        write_file(self, "a.bin", CONTENT)

    def read(self, name: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> memoryview:
        content = super().read(name, start, stop, sha256=sha256)
        self.fetched += len(content)
        return content


@pytest.fixture
def far(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return Counted(tmp_path_factory.mktemp("far"))


def part(folder: CachedFolder, start: int, stop: int) -> bytes:
    return bytes(folder.read("a.bin", start, stop, sha256=hashlib.sha256(CONTENT[start:stop]).hexdigest()))


def test_no_byte_is_served_that_does_not_match(far, tmp_path):
    drawn = random.Random(1)
    folder = CachedFolder(far, tmp_path, limit=10**9)
    part(folder, 1000, 300_000)
    [kept] = (path for path in folder.path.iterdir())
    for damage in range(30):
        with kept.open("r+b") as file:
            if damage % 3 == 0:
                file.truncate(drawn.randrange(1000, 300_000))
            file.seek(drawn.randrange(1000, 299_990))
            file.write(b"\0" * drawn.randrange(1, 10) if damage % 3 else b"")
        assert part(folder, 1000, 300_000) == CONTENT[1000:300_000]
    assert far.fetched > 299_000
    kept.write_bytes(b"")
    assert part(folder, 1000, 300_000) == CONTENT[1000:300_000]


def test_the_cache_stays_under_its_limit_and_keeps_what_was_read_last(far, tmp_path):
    limit = 12_000_000
    for number in range(20):
        write_file(far, f"{number}.bin", CONTENT)
    expected = hashlib.sha256(CONTENT[:1_000_000]).hexdigest()
    folders = [CachedFolder(far, tmp_path, limit=limit) for _ in range(3)]
    for number in range(20):
        folders[number % 3].read(f"{number}.bin", 0, 1_000_000, sha256=expected)
        os.utime(folders[0].path / f"{number}.bin", (number, number))
        assert sum(each.stat().st_blocks * 512 for each in tmp_path.glob("*/*")) <= limit
    left = sorted(int(path.stem) for path in folders[0].path.iterdir())
    assert len(left) >= 9 and left[-8:] == list(range(12, 20))


def test_a_disk_that_takes_nothing_is_said_and_costs_only_time(far, tmp_path, caplog):
    folder = CachedFolder(far, tmp_path, limit=10**9)
    (folder.path / "a.bin").mkdir()
    for _ in range(3):
        assert part(folder, 0, 1000) == CONTENT[:1000]
    [record] = caplog.records
    assert f"data.cache_dir={tmp_path}" in record.getMessage()
    assert record.levelno > logging.WARNING  # of these, only the first rank shows its own


def test_a_cache_that_cannot_be_made_is_named(far, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"data.cache_dir={tmp_path}/file: Not a directory; give a folder"):
        CachedFolder(far, tmp_path / "file", limit=10**9)


def test_a_store_behind_a_cache_is_fetched_once_by_all_processes_and_after_a_restart(far, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3.features.concat.open_folder", lambda *_, **__: far)
    save_store(far, random_samples(40))
    plain, fetched = FeatureStore(far), []
    for _ in range(3):
        cached = open_source("s3://far", cache_dir=str(tmp_path), cache_gb=1)
        before = far.fetched
        read = [cached.read(ref).aux_hidden_states for ref in cached.samples]
        fetched.append(far.fetched - before)
        assert all(
            torch.equal(plain.read(ref).aux_hidden_states, rows) for ref, rows in zip(plain.samples, read, strict=True)
        )
    assert fetched == [sum(ref.entry.size for ref in plain.samples), 0, 0]
