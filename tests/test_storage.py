"""Files are whole or absent, sealed where they are believed, and written by one process at a time."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import ROOT

from eagle3.errors import InputError
from eagle3.storage import (
    atomic_write,
    hold,
    json_line,
    read_json,
    read_jsonl,
    read_sealed_json,
    write_json,
    write_sealed_json,
)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"old": 1})
    with pytest.raises(OSError, match="no space"), atomic_write(path) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "no space")
    assert read_json(path, made_by="x") == {"old": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["file.json"]


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json_line({"a": 1}) + json_line({"a": 2})[:-4])
    assert list(read_jsonl(path)) == [{"a": 1}]


def test_missing_and_broken_json_name_the_file_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.json does not exist; make it with: python make\.py"):
        read_json(tmp_path / "x.json", made_by="python make.py")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match=r"x\.json is not valid JSON .*python make\.py"):
        read_json(tmp_path / "x.json", made_by="python make.py")


RECORD = {"name": "a name", "rows": 5, "nested": {"layers": [2, 4, 5]}}


def test_sealed_json_is_read_as_it_was_written_and_by_any_other_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_sealed_json(path, RECORD)
    assert read_sealed_json(path, made_by="x") == RECORD
    assert json.loads(path.read_bytes()) == RECORD | {"seal": json.loads(path.read_bytes())["seal"]}


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


@pytest.mark.parametrize("line", [b"[]", b"3", b"{", b'"\xff"', b"{'a': 1}"])
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json_line({"a": 1}) + line + b"\n")
    with pytest.raises(InputError, match=r"rows\.jsonl line 2 is damaged"):
        list(read_jsonl(path))


HOLDS = """
import sys, time
from pathlib import Path
from eagle3.storage import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_has_one_writer_and_a_killed_one_gives_it_back(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=rf"is being written by process {other.pid} on .* since 20.*; wait for it"):
            hold(tmp_path).__enter__()
        other.kill()
    with hold(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
