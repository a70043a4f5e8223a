"""What is sealed shows every change."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import InputError
from eagle3.storage.records import read_sealed_json, sealed_line, unseal, write_sealed_json

RECORD = {"name": "a name", "rows": 5, "nested": {"layers": [2, 4, 5]}}


def test_sealed_json_is_read_as_it_was_written_and_by_any_other_reader(tmp_path):
    path = tmp_path / "x.json"
    write_sealed_json(path, RECORD)
    assert read_sealed_json(path, made_by="x") == RECORD
    assert json.loads(path.read_bytes()) == RECORD | {"seal": json.loads(path.read_bytes())["seal"]}
    assert json.loads(unseal(sealed_line(RECORD), source="", remedy="")) == RECORD


@given(place=st.integers(0, 200), bit=st.integers(0, 7), cut=st.booleans())
def test_no_flipped_bit_and_no_cut_passes(place, bit, cut):
    """In a file and in a line; what a file is refused with names it and its command."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        write_sealed_json(path, RECORD)
        path.write_bytes(damaged(path.read_bytes(), place, bit, cut))
        with pytest.raises(InputError, match=r"x\.json") as refused:
            read_sealed_json(path, made_by="python make.py")
    assert str(refused.value).endswith("; move it away, then: python make.py") and "\n" not in str(refused.value)
    with pytest.raises(InputError, match="damaged or edited"):
        unseal(damaged(sealed_line(RECORD), place, bit, cut), source="", remedy="")


def damaged(whole: bytes, place: int, bit: int, cut: bool) -> bytes:
    place %= len(whole)
    return whole[:place] + (b"" if cut else bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
