"""Export: files that give the logits of training, in SGLang's notation, whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead
from eagle3.serving.head.export import (
    TrainedHead,
    check_reload,
    export_head,
    find_checkpoint,
    in_dtype,
    probe,
    read_trained,
)
from eagle3.serving.head.format import checkpoint_config, load_head, save_head
from eagle3.storage import write_json

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OPTIONS = {
    "plain": {},
    "fc_norm and norm_output": {"fc_norm": True, "norm_output": True},
    "llama3": {"rope_parameters": LLAMA3},
}


def origin_of(layers: list[int]) -> dict:
    return {
        "capture_layers": layers,
        "target": {"name": "some/target", "revision": None, "template_hash": "t"},
        "target_config": {"dtype": "bfloat16"},
        "path": "/nowhere/features",
        "hash": "h",
        "val_fraction": 0.5,
    }


def save_checkpoint(path: Path, head: DraftHead) -> Path:
    """As Lightning and HeadTraining write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    simulated = {"val/accept_length": 2.5, "val/served_accept_length_3": 1.5, "val/served_accept_length_5": 2.0}
    config, origin = head.config.to_dict(), origin_of([2, 4, 5])
    facts = {"head_config": config, "ttt_steps": 5, "accept_length": simulated, "origin": origin}
    torch.save({"state_dict": nn.ModuleDict({"head": head}).state_dict(), "eagle3": facts}, path)
    return path


@pytest.fixture
def trained(make_head: Callable[..., DraftHead], tmp_path: Path) -> TrainedHead:
    return read_trained(save_checkpoint(tmp_path / "run/checkpoints/best-step9-accept2.000.ckpt", make_head().float()))


@pytest.mark.parametrize("name", OPTIONS)
def test_exported_head_gives_the_logits_of_the_training_checkpoint(
    name: str, make_head: Callable[..., DraftHead], tmp_path: Path
) -> None:
    trained = read_trained(save_checkpoint(tmp_path / "best.ckpt", make_head(**OPTIONS[name]).float()))
    export_head(trained, tmp_path / "head", versions={})
    loaded = load_head(tmp_path / "head")
    assert torch.equal(probe(loaded.head), probe(in_dtype(trained.head, torch.bfloat16)))
    assert loaded.head.config == trained.head.config
    assert loaded.capture_layers == [2, 4, 5]
    assert check_reload(trained, tmp_path / "head").level == "ok"


@pytest.mark.parametrize(
    "tensor", ["fc.weight", "norm.weight", "midlayer.hidden_norm.weight", "midlayer.self_attn.k_proj.weight"]
)
def test_a_changed_tensor_gives_other_logits(tensor: str, trained: TrainedHead, tmp_path: Path) -> None:
    export_head(trained, tmp_path / "head", versions={})
    path = tmp_path / "head/model.safetensors"
    tensors = load_file(path)
    tensors[tensor].view(-1)[0] += 1
    save_file(tensors, path)
    assert check_reload(trained, tmp_path / "head").level == "error"


def test_files_are_in_the_notation_of_sglang(trained: TrainedHead, tmp_path: Path) -> None:
    export_head(trained, tmp_path / "head", versions={"torch": "x"})
    tensors = load_file(tmp_path / "head/model.safetensors")
    config = json.loads((tmp_path / "head/config.json").read_text())
    training = json.loads((tmp_path / "head/training.json").read_text())
    head = trained.head
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["draft_vocab_size"] == len(tensors["lm_head.weight"])
    assert torch.equal(tensors["d2t"] + torch.arange(30), head.draft_ids)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == head.draft_ids.tolist()
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert training["simulated_accept_length"] == {"3": 1.5, "5": 2.0}
    assert training["capture_layers"] == [2, 4, 5]


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 100.0}, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("reader", ["as written", "rope_theta and rope_scaling alone"])
def test_transformers_reads_the_rope_of_the_head(
    rope: dict, reader: str, make_head: Callable[..., DraftHead], tmp_path: Path
) -> None:
    config = checkpoint_config(make_head(rope_parameters=rope).config, [2, 4, 5], "bfloat16")
    if reader != "as written":
        del config["rope_parameters"]
    write_json(tmp_path / "config.json", config)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0."])
def test_heads_of_other_trainers_are_read(prefix: str, make_head: Callable[..., DraftHead], tmp_path: Path) -> None:
    head = make_head(fc_norm=True).float()
    save_head(tmp_path, head, [2, 4, 5], "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    norms = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}
    for ours, theirs in {"midlayer.": prefix, **norms}.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    del tensors["t2d"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "dtype", "fc_norm", "head_dim"):
        del config[key]
    config |= {"use_aux_norm": True, "head_dim": 8}
    write_json(tmp_path / "config.json", config)
    loaded = load_head(tmp_path)
    assert torch.equal(probe(loaded.head), probe(head))
    assert loaded.head.config == head.config


def test_without_d2t_the_draft_vocabulary_is_the_whole_one(make_head: Callable[..., DraftHead], tmp_path: Path) -> None:
    head = make_head().float()
    save_head(tmp_path, head, [2, 4, 5], "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="has no tensor d2t, so its 30 draft ids mean nothing"):
        load_head(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 30}
    write_json(tmp_path / "config.json", config)
    assert load_head(tmp_path).head.draft_ids.tolist() == list(range(30))


def test_a_missing_tensor_is_named(make_head: Callable[..., DraftHead], tmp_path: Path) -> None:
    save_head(tmp_path, make_head(), [2, 4, 5], "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"fc\.weight must have shape \(16, 48\) by config.json, the file has nothing"):
        load_head(tmp_path)


def test_the_best_checkpoint_of_a_run_is_found_where_the_run_is_now(trained: TrainedHead, tmp_path: Path) -> None:
    run, best = tmp_path / "run", trained.checkpoint
    (run / "checkpoints/last.ckpt").write_bytes(best.read_bytes())
    assert find_checkpoint(run=str(run), checkpoint=None) == best
    write_json(run / "result.json", {"checkpoint": f"/elsewhere/run/checkpoints/{best.name}"})
    assert find_checkpoint(run=str(run), checkpoint=None) == best
    assert find_checkpoint(run=str(run), checkpoint=str(run / "checkpoints/last.ckpt")).name == "last.ckpt"
    with pytest.raises(InputError, match="run is not set"):
        find_checkpoint(run=None, checkpoint=None)
    with pytest.raises(InputError, match=r"run=.*nothing: .*last\.ckpt does not exist"):
        find_checkpoint(run=str(tmp_path / "nothing"), checkpoint=None)


def test_an_older_export_is_replaced_and_anything_else_left_alone(trained: TrainedHead, tmp_path: Path) -> None:
    head = tmp_path / "head"
    export_head(trained, head, versions={})
    (head / "stale.txt").touch()
    export_head(trained, head, versions={})
    assert sorted(path.name for path in head.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "mine.txt").touch()
    with pytest.raises(InputError, match=r"notes exists and is no exported head"):
        export_head(trained, notes, versions={})
    assert (notes / "mine.txt").exists()


@pytest.mark.parametrize("place", [".", "./", ".."])
def test_a_folder_without_a_name_of_its_own_is_refused(
    place: str, trained: TrainedHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    with pytest.raises(InputError, match=r"head=\.+ gives the folder no name of its own"):
        export_head(trained, Path(place), versions={})


def test_an_export_that_fails_leaves_the_older_one_whole(trained: TrainedHead, tmp_path: Path) -> None:
    export_head(trained, tmp_path / "head", versions={})
    before = (tmp_path / "head/model.safetensors").read_bytes()
    with pytest.raises(TypeError):
        export_head(trained, tmp_path / "head", versions={"torch": object()})  # not JSON: fails after the tensors
    assert (tmp_path / "head/model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_older_export_comes_back_when_the_new_one_cannot_take_its_place(
    trained: TrainedHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_head(trained, tmp_path / "head", versions={})
    (tmp_path / "head/mine.txt").touch()
    rename = Path.rename

    def failing(path: Path, to: Path) -> Path:
        if path.suffix == ".tmp" and to.name == "head":
            raise OSError("no more")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no more"):
        export_head(trained, tmp_path / "head", versions={})
    assert (tmp_path / "head/mine.txt").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
