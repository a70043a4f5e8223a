"""training.json: read as it was written, and one line of what is wrong with whatever was not."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from exported_head import FINGERPRINT, make_head_record, measured
from heads import make_head
from stores import TARGET_CONFIG

from eagle3.errors import InputError
from eagle3.head_files.record import HeadRecord, read_record, write_record
from eagle3.storage.records import seal


@pytest.fixture
def record() -> HeadRecord:
    return make_head_record(make_head(), FINGERPRINT, TARGET_CONFIG)


def as_file(content: dict[str, Any]) -> bytes:
    return seal(json.dumps(content, indent=1).encode() + b"\n")


def test_a_record_is_read_as_it_was_written(record, tmp_path):
    joined = replace(record, origin=replace(record.origin, path=["a", "b"]), accept_length=measured())
    for each in (record, joined, replace(record, simulated_accept_length={})):
        write_record(tmp_path, each)
        assert read_record(tmp_path, made_by="EXPORT") == each


def test_a_record_without_the_keys_of_later_versions_is_read(record, tmp_path):
    older = asdict(replace(record, accept_length=measured()))
    del older["origin"]["tokens_of_99_percent"], older["accept_length"]["draft_window"]
    (tmp_path / "training.json").write_bytes(as_file(older))
    found = read_record(tmp_path, made_by="EXPORT")
    assert found is not None and found.origin.tokens_of_99_percent is None and found.accept_length == measured()


def test_the_record_of_an_earlier_version_is_left_out_with_a_warning(tmp_path, caplog):
    (tmp_path / "training.json").write_bytes(as_file({"format_version": 4, "head_config": {}}))
    assert read_record(tmp_path, made_by="EXPORT") is None
    assert "format_version=4 is of an earlier version" in caplog.text and "EXPORT" in caplog.text


def test_no_path_of_this_machine_is_written_and_what_lies_near_is_found(record, tmp_path):
    target = replace(record.origin.target, name=str(tmp_path / "target"))
    here = replace(record, origin=replace(record.origin, path=[str(tmp_path / "a"), "s3://b/c"], target=target))
    (tmp_path / "heads/one").mkdir(parents=True)
    write_record(tmp_path / "heads/one", here)
    assert str(tmp_path) not in (tmp_path / "heads/one/training.json").read_text()
    assert read_record(tmp_path / "heads/one", made_by="EXPORT") == here


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"ttt_steps": 7.5}, "ttt_steps=7.5: Input should be a valid integer"),
        ({"origin": {"path": "p", "hash": "h"}}, "origin.target is missing"),
        ({"epochs": 3}, "epochs is unknown"),
        ({"format_version": 6, "epochs": 3}, "format_version=6, this code reads 5"),
    ],
)
def test_what_this_version_does_not_write_is_refused_by_its_field(changes, fault, record, tmp_path):
    (tmp_path / "training.json").write_bytes(as_file(asdict(record) | changes))
    remedy = "export the head again, or take the file out of the folder: EXPORT"
    with pytest.raises(InputError, match=rf"training\.json: {fault}.*; {remedy}$"):
        read_record(tmp_path, made_by="EXPORT")
