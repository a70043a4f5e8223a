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


def test_sealed_json_is_read_as_it_was_written_and_by_any_other_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_sealed_json(path, RECORD)
    assert read_sealed_json(path, made_by="x") == RECORD
    assert json.loads(path.read_bytes()) == RECORD | {"seal": json.loads(path.read_bytes())["seal"]}


@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_in_a_line_passes(bit: int) -> None:
    line = sealed_line(RECORD)
    assert json.loads(unseal(line, source="", remedy="")) == RECORD
    for place, byte in enumerate(line):
        with pytest.raises(InputError, match="damaged or edited"):
            unseal(line[:place] + bytes([byte ^ 1 << bit]) + line[place + 1 :], source="", remedy="")


@given(place=st.integers(0, 200), bit=st.integers(0, 7), cut=st.booleans())
def test_no_flipped_bit_and_no_cut_passes(place: int, bit: int, cut: bool) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        write_sealed_json(path, RECORD)
        whole = path.read_bytes()
        place %= len(whole)
        flipped = bytes([whole[place] ^ 1 << bit])
        path.write_bytes(whole[:place] if cut else whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(InputError, match=r"x\.json") as refused:
            read_sealed_json(path, made_by="python make.py")
        assert str(refused.value).endswith("run: python make.py") and "\n" not in str(refused.value)
