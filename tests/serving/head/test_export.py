"""Export: the best Lightning checkpoint of a run becomes a head's folder, whole or not at all."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from exported_head import FINGERPRINT, LAYERS, record_of, save_checkpoint
from heads import make_head
from pydantic_core import PydanticSerializationError
from stores import TARGET_CONFIG

from eagle3.errors import InputError
from eagle3.head_files.format import load_head
from eagle3.head_files.record import read_record
from eagle3.serving.head.export import TrainedHead, export_head, find_checkpoint, read_trained, target_settings
from eagle3.storage.records import write_sealed_json


@pytest.fixture
def trained(tmp_path: Path) -> TrainedHead:
    head = make_head().float()
    written = TrainedHead(head, record_of(head, FINGERPRINT), replace(TARGET_CONFIG, dtype="bfloat16"))
    return read_trained(save_checkpoint(tmp_path / "run/checkpoints/best-step9-accept2.000.ckpt", written))


def test_a_checkpoint_becomes_the_head_and_its_record(trained: TrainedHead, tmp_path: Path) -> None:
    export_head(trained, tmp_path / "head", versions={"torch": "x"})
    loaded, record = load_head(tmp_path / "head"), read_record(tmp_path / "head", made_by="this test")
    weights = {name: weight.bfloat16() for name, weight in trained.head.named_parameters()}
    torch.testing.assert_close(dict(loaded.head.named_parameters()), weights, rtol=0, atol=0)
    assert torch.equal(loaded.head.draft_ids, trained.head.draft_ids)
    assert record is not None
    assert (record.head_config, record.capture_layers) == (asdict(trained.head.config), LAYERS)
    assert (record.simulated_accept_length, record.accept_length) == ({7: 1.0}, None)
    assert (record.target, record.versions) == (FINGERPRINT, {"torch": "x"})
    assert record.checkpoint == "run/checkpoints/best-step9-accept2.000.ckpt"


def test_the_best_checkpoint_of_a_run_is_found_where_the_run_is_now(trained: TrainedHead, tmp_path: Path) -> None:
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


def test_the_target_is_the_recorded_one_unless_another_is_named(trained: TrainedHead) -> None:
    unset = {"path": None, "revision": "main", "dtype": "auto"}
    assert target_settings(unset, trained) == {"path": "tiny", "revision": None, "dtype": "auto"}
    assert target_settings(unset | {"path": "here"}, trained) == unset | {"path": "here"}


def test_an_older_export_is_replaced_and_anything_else_left_alone(trained: TrainedHead, tmp_path: Path) -> None:
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


def test_an_export_that_fails_leaves_the_older_one_whole(
    trained: TrainedHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def failing(path: Path, to: Path) -> Path:
        if path.suffix == ".tmp" and to.name == "head":
            raise OSError("no more")
        return rename(path, to)

    export_head(trained, tmp_path / "head", versions={})
    (tmp_path / "head/README.md").touch()
    with pytest.raises(PydanticSerializationError):
        export_head(trained, tmp_path / "head", versions={"torch": object()})  # not JSON: fails after the tensors
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no more"):
        export_head(trained, tmp_path / "head", versions={})
    assert (tmp_path / "head/README.md").exists() and (tmp_path / "head/training.json").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
