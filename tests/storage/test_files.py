"""Files are whole or absent; what is damaged is named."""

import errno

import pytest

from eagle3.errors import InputError
from eagle3.storage.files import atomic_write, json_line, read_json, read_jsonl, write_json


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"old": 1})
    with pytest.raises(OSError, match="no space"), atomic_write(path) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "no space")
    assert read_json(path, made_by="x") == {"old": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["file.json"]


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"  # as a benchmark of servers appends its loads
    path.write_bytes(json_line({"a": 1}) + json_line({"a": 2})[:-4])
    assert list(read_jsonl(path)) == [{"a": 1}]


def test_a_damaged_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json_line({"a": 1}) + b'"\xff"\n')
    with pytest.raises(InputError, match=r"rows\.jsonl line 2 is damaged"):
        list(read_jsonl(path))
