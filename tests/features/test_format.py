"""The page on the format says what is so, and a damaged sample ends in nothing but the reader's own error."""

import os
import random
import re
import resource
from typing import Any

import pytest
import torch
from stores import ROOT, in_fp8, open_store, random_samples, write_store

from eagle3.errors import InputError
from eagle3.features.sample import ScaledRows, to_buffers
from eagle3.features.shards import decode

INPUTS = int(os.environ.get("FUZZ_INPUTS", "1000"))  # a million: FUZZ_INPUTS=1000000 python -m pytest FILE


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_the_reader_on_the_page_reads_what_ours_does(tmp_path, monkeypatch, dtype):
    samples = random_samples(3)
    store = open_store(write_store(tmp_path, samples if dtype == "float32" else [in_fp8(each) for each in samples]))
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reference" / "format.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 11
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(code, found)
    ours = store.read(store.samples[0])
    rows: Any = ours.aux_hidden_states
    assert torch.equal(found["ids"], ours.input_ids.long())
    assert torch.equal(found["aux"], rows.to(torch.device("cpu")).float() if isinstance(rows, ScaledRows) else rows)


def damaged(whole: bytes, drawn: random.Random) -> bytes:
    """Change one to eight things: a bit, a number's digit, the length; mostly in the header."""
    content = bytearray(whole)
    header = min(len(content), 900)
    for _ in range(drawn.randint(1, 8)):
        place = drawn.randrange(header if drawn.random() < 0.8 else len(content)) % max(1, len(content))
        kind = drawn.randrange(4)
        if kind == 0:
            content[place] ^= 1 << drawn.randrange(8)
        elif kind == 1:
            if digits := [at for at, byte in enumerate(content[:header]) if 48 <= byte <= 57]:
                content[drawn.choice(digits)] = drawn.randrange(48, 58)
        elif kind == 2:
            content = content[: drawn.randrange(len(content) + 1)]
        else:
            content[:8] = drawn.choice([0, 1, len(content), 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
        content = content or bytearray(b"\0")
    return bytes(content)


def test_no_sample_ends_in_anything_but_an_error_of_the_reader(store_path):
    """In no more memory than the sample: 256 MB above what the process holds would be a header that was believed."""
    drawn = random.Random(0)
    whole = [b"".join(to_buffers(each)) for sample in random_samples(4) for each in (sample, in_fp8(sample))]
    entry, refused = open_store(store_path).samples[0].entry, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(INPUTS):
        content = memoryview(bytearray(damaged(drawn.choice(whole), drawn)))
        try:
            decode(content, entry, path="fuzz", teachers="answers")
        except InputError as error:
            refused += 1
            assert "\n" not in str(error).split("(")[0]
    assert refused > INPUTS // 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # kB
