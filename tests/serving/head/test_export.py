"""Export: the best Lightning checkpoint of a run becomes a head's folder, whole or not at all."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import defaults
import pytest
import torch
from exported_head import FINGERPRINT, export_head, make_head_record, save_checkpoint, with_origin
from heads import make_head
from stores import TARGET_CONFIG

from eagle3.errors import InputError
from eagle3.head_files.files import read_files
from eagle3.head_files.format import load_head
from eagle3.head_files.record import read_record
from eagle3.serving.head import export
from eagle3.serving.head.export import (
    TrainedHead,
    find_checkpoint,
    is_export_of,
    read_trained,
    require_replaceable,
)
from eagle3.storage import replace as replace_module
from eagle3.storage.records import write_sealed_json
from eagle3.storage.replace import replacing
from eagle3.target.identity import recorded_settings


@pytest.fixture
def trained(tmp_path: Path) -> TrainedHead:
    head = make_head().float()
    written = TrainedHead(head, make_head_record(head, FINGERPRINT, replace(TARGET_CONFIG, dtype="bfloat16")))
    return read_trained(save_checkpoint(tmp_path / "run/checkpoints/best-step9-accept2.000.ckpt", written))


def test_a_checkpoint_becomes_the_head_and_its_record(trained, tmp_path):
    export_head(trained, tmp_path / "head", versions={"torch": "x"})
    loaded, record = load_head(tmp_path / "head", num_layers=8), read_record(tmp_path / "head", made_by="this test")
    weights = {name: weight.bfloat16() for name, weight in trained.head.named_parameters()}
    torch.testing.assert_close(dict(loaded.head.named_parameters()), weights, rtol=0, atol=0)
    assert torch.equal(loaded.head.draft_ids, trained.head.draft_ids)
    assert record is not None
    assert (record.simulated_accept_length, record.accept_length) == ({7: 1.0}, None)
    assert (record.origin, record.versions) == (trained.record.origin, {"torch": "x"})
    assert record.checkpoint == "run/checkpoints/best-step9-accept2.000.ckpt"


def test_a_kind_whose_settings_have_changed_since_the_training_is_one_line(trained, tmp_path, monkeypatch):
    checkpoint = tmp_path / "run/checkpoints/best-step9-accept2.000.ckpt"
    read = export.read_checkpoint(checkpoint, setting="this test")
    record = replace(read.record, head_config=read.record.head_config | {"window": 8})
    monkeypatch.setattr(export, "read_checkpoint", lambda path, setting: replace(read, record=record))
    with pytest.raises(InputError, match=r"model.kind=eagle3 has changed since the training .*window.* as it was"):
        read_trained(checkpoint)


def test_a_head_is_of_a_checkpoint_until_that_is_another_or_written_again(trained, tmp_path):
    head, best = tmp_path / "head", tmp_path / trained.record.checkpoint
    assert not is_export_of(head, best)
    export_head(trained, head, versions={})
    assert is_export_of(head, best)
    assert not is_export_of(head, best.with_name("best-step12-accept2.100.ckpt"))
    os.utime(best, ns=(0, (head / "training.json").stat().st_mtime_ns + 1))
    assert not is_export_of(head, best)


def test_the_best_checkpoint_of_a_run_is_found_where_the_run_is_now(trained, tmp_path):
    run, best = tmp_path / "run", tmp_path / trained.record.checkpoint
    (run / "checkpoints/last.ckpt").write_bytes(best.read_bytes())
    assert find_checkpoint(run=str(run), checkpoint=None) == best
    write_sealed_json(run / "result.json", {"checkpoint": f"/elsewhere/run/checkpoints/{best.name}"})
    assert find_checkpoint(run=str(run), checkpoint=None) == best
    assert find_checkpoint(run=str(run), checkpoint=str(run / "checkpoints/last.ckpt")).name == "last.ckpt"
    with pytest.raises(InputError, match="run is not set"):
        find_checkpoint(run=None, checkpoint=None)
    with pytest.raises(InputError, match=r"run=.*nothing: .*last\.ckpt does not exist"):
        find_checkpoint(run=str(tmp_path / "nothing"), checkpoint=None)
    best.unlink()
    with pytest.raises(InputError, match=f"best.* does not exist; give checkpoint={run}/checkpoints/last.ckpt"):
        find_checkpoint(run=str(run), checkpoint=None)


def test_the_target_is_the_recorded_one_unless_another_is_named(trained):
    recorded, unset = trained.record.origin.target, defaults.target(path=None, revision="main")
    assert recorded_settings(unset, recorded) == replace(unset, path="tiny", revision=None)
    named = replace(unset, path="here")
    assert recorded_settings(named, recorded) == named


def test_an_older_export_is_replaced_and_anything_else_left_alone(trained, tmp_path):
    head = tmp_path / "head"
    export_head(trained, head, versions={})
    (head / "model-00001-of-00002.safetensors").touch()
    export_head(trained, head, versions={})
    assert sorted(path.name for path in head.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "mine.txt").touch()
    with pytest.raises(InputError, match=r"notes exists and is no exported head"):
        export_head(trained, notes, versions={})
    (head / "mine.txt").touch()
    with pytest.raises(InputError, match=r"head also holds mine\.txt, which no export wrote: it is left alone"):
        export_head(trained, head, versions={})
    assert (notes / "mine.txt").exists() and (head / "mine.txt").exists()


@pytest.mark.parametrize("place", [".", "..", "/", "/proc"])
def test_a_folder_that_cannot_be_replaced_is_one_line(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"head={place} is .* cannot be replaced; name a folder in it"):
        require_replaceable(Path(place))


def test_two_exports_into_one_folder_do_not_mix(trained, tmp_path):
    with replacing(tmp_path / "head"), pytest.raises(InputError, match="is being written by process"):
        export_head(trained, tmp_path / "head", versions={})
    export_head(trained, tmp_path / "head", versions={})


@pytest.mark.parametrize("exchanges", [True, False], ids=["names exchanged at once", "renamed one by one"])
def test_a_kill_at_any_instant_leaves_a_whole_head(exchanges, trained, tmp_path, monkeypatch):
    """Each state between two steps on disk is copied, as a kill would leave it; then `check` and an export find it."""
    head, states = tmp_path / "now/head", tmp_path / "states"
    export_head(trained, head, versions={"torch": "old"})
    rename, number = Path.rename, iter(range(100))

    def watched(path: Path, to: Path) -> Path:
        shutil.copytree(tmp_path / "now", states / str(next(number)))
        renamed = rename(path, to)
        shutil.copytree(tmp_path / "now", states / str(next(number)))
        return renamed

    def watched_exchange(one: Path, other: Path) -> bool:
        shutil.copytree(tmp_path / "now", states / str(next(number)))
        done = exchanges and exchange(one, other)
        shutil.copytree(tmp_path / "now", states / str(next(number)))
        return done

    exchange = replace_module._exchange
    monkeypatch.setattr(replace_module, "_exchange", watched_exchange)
    monkeypatch.setattr(Path, "rename", watched)
    export_head(trained, head, versions={"torch": "new"})
    monkeypatch.undo()
    kept, found = [*states.iterdir()], set()
    for state in kept:
        again = shutil.copytree(state, state.with_name(f"{state.name} again"))
        files = read_files(state / "head")
        assert files.record is not None and files.tensors
        found.add(files.record.versions["torch"])
        export_head(trained, again / "head", versions={"torch": "newest"})
        assert [path.name for place in (state, again) for path in place.iterdir()] == ["head", "head"]
    assert found == {"old", "new"} and len(kept) == (2 if exchanges else 6)


def test_paths_in_the_record_are_as_seen_from_the_folder_of_the_head(trained, tmp_path):
    target = replace(trained.record.origin.target, name=str(tmp_path / "here/models/mine"))
    head = tmp_path / "here/head"
    export_head(with_origin(trained, target=target), head, versions={})
    (tmp_path / "here").rename(tmp_path / "there")
    record = read_record(tmp_path / "there/head", made_by="this test")
    assert record is not None and record.origin.target.name == str(tmp_path / "there/models/mine")
