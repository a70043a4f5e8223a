"""Pages that are asked for ahead: the same bytes, of any memory, at any place."""

import hashlib
import random
import resource

import numpy as np
import pytest

from eagle3.storage import prefault
from eagle3.storage.folder import LocalFolder


def faults() -> int:
    facts = resource.getrusage(resource.RUSAGE_THREAD)
    return facts.ru_minflt + facts.ru_majflt


def test_pages_of_a_mapped_file_come_at_once(tmp_path):
    content = random.Random(0).randbytes(16 * 2**20)
    (tmp_path / "a").write_bytes(content)
    looked_at = []
    for ahead in (False, True):
        mapped = np.frombuffer(LocalFolder(tmp_path).read("a"), np.uint8)
        if ahead:
            prefault.bring_in(mapped.ctypes.data, len(mapped))
        before = faults()
        assert int(mapped.sum()) == sum(content)
        looked_at.append(faults() - before)
    if looked_at[0] < 100:
        pytest.skip("this system brings pages by itself")
    assert looked_at[1] < looked_at[0] / 10


@pytest.mark.parametrize("size", [0, 1, 5000, 10_000])
def test_the_hash_is_that_of_all_bytes_wherever_they_are(monkeypatch, size):
    monkeypatch.setattr(prefault, "AT_ONCE", 4999)
    content = random.Random(size).randbytes(size + 1)
    assert prefault.sha256_bytes(memoryview(content)[1:]) == hashlib.sha256(content[1:]).hexdigest()
    prefault.bring_in(0, 10**6)  # nobody's: looked at by nobody
