"""The files alone say which model a target is, and hold its embedding and lm_head (test_capture.py: of each family)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from families import SHAPE, build_model, save_with_tokenizer
from safetensors.torch import load_file, save_file

from eagle3.errors import InputError
from eagle3.target.stored import StoredTarget, stored_target
from eagle3.target.tensors import INDEX, CheckpointTensors


def stored(folder: Path | str) -> StoredTarget:
    return stored_target(path=str(folder))


def test_a_changed_weight_and_one_that_is_not_there_show(tiny_path, tmp_path):
    folder = shutil.copytree(tiny_path, tmp_path / "target")
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    tensors[name][0, 0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert stored(folder).identity.weights_hash != stored(tiny_path).identity.weights_hash
    changed = stored(folder).identity
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    assert stored(folder).identity.weights_hash not in (changed.weights_hash, stored(tiny_path).identity.weights_hash)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"holds no \*\.safetensors, and other formats .* give its weights"),
        (b"version https://git-lfs", r"model\.safetensors cannot be read .*Git LFS.*fetch it again"),
    ],
)
def test_weights_that_were_not_fetched_are_one_line(without_weights, content, message):
    if content is not None:
        (without_weights / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=rf"target\.path={without_weights}.*{message}"):
        _ = stored(without_weights).identity


def test_a_fine_tune_of_any_one_tensor_is_another_target(tmp_path):
    """Also of experts and routers alone, which are stored one by one or as one tensor."""
    torch.manual_seed(0)
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        folder = tmp_path / family
        save_with_tokenizer(build_model(family, 4), folder)
        file, first = folder / "model.safetensors", CheckpointTensors(str(folder), None, folder).hash(4)
        tensors = load_file(file)
        for name in tensors:
            changed = {**tensors, name: tensors[name] + 0.1 * torch.randn(tensors[name].shape).to(tensors[name].dtype)}
            file.unlink()
            save_file(changed, file, metadata={"format": "pt"})
            assert CheckpointTensors(str(folder), None, folder).hash(4) != first, name


def test_a_copy_of_a_tied_lm_head_and_another_order_of_names_are_the_same_target(tiny_path, tmp_path):
    folder = shutil.copytree(tiny_path, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    (folder / "model.safetensors").unlink()
    renamed = {name.removeprefix("model.").replace("norm", "z_norm"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert stored(folder).identity.weights_hash == stored(tiny_path).identity.weights_hash


def test_two_sets_of_weights_are_refused_as_transformers_and_servers_would_read_different_ones(tiny_path, tmp_path):
    folder = shutil.copytree(tiny_path, tmp_path / "target")
    shard = shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(load_file(shard), Path(shard).name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=r"two sets of weights: .*model\.safetensors, .*index\.json names; remove the"):
        stored(folder).require_weights()
    (folder / "model.safetensors").unlink()
    assert stored(folder).identity.weights_hash == stored(tiny_path).identity.weights_hash


@pytest.mark.parametrize("rows", [4096, 4000])
def test_an_lm_head_next_to_the_embedding_that_config_json_ties_it_to_is_the_same_or_refused(rows, tiny_path, tmp_path):
    folder = shutil.copytree(tiny_path, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    for lm_head in (tensors["model.embed_tokens.weight"].clone(), torch.zeros(rows, 192, dtype=torch.bfloat16)):
        save_file({**tensors, "lm_head.weight": lm_head}, folder / "model.safetensors", metadata={"format": "pt"})
        if lm_head.any():
            stored(folder).require_weights()
            continue
        for use in (StoredTarget.require_weights, lambda target: target.lm_head):
            with pytest.raises(InputError, match=r"tie_word_embeddings=true .*set tie_word_embeddings=false"):
                use(stored(folder))


def test_other_names_of_the_embedding_and_of_lm_head_are_found(tmp_path):
    config = transformers.GPTNeoXConfig(**{**SHAPE, "num_hidden_layers": 2})
    model = transformers.AutoModelForCausalLM.from_config(config)
    save_with_tokenizer(model, tmp_path)
    assert torch.equal(stored(tmp_path).embedding, model.get_input_embeddings().weight)
    assert torch.equal(stored(tmp_path).lm_head, model.get_output_embeddings().weight)


def test_names_that_transformers_changes_when_it_loads_are_found(without_weights):
    config = {"model_type": "deepseek_v4", "hidden_size": 32, "vocab_size": 4096, "num_hidden_layers": 2}
    (without_weights / "config.json").write_text(json.dumps(config))
    saved = {name: torch.rand(4096, 32) for name in ("embed.weight", "head.weight")}
    save_file(saved, without_weights / "model.safetensors")
    assert torch.equal(stored(without_weights).embedding, saved["embed.weight"])
    assert torch.equal(stored(without_weights).lm_head, saved["head.weight"])


def test_a_target_without_attention_is_refused_before_it_answers(without_weights):
    (without_weights / "config.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": 4096}))
    save_file({"backbone.embeddings.weight": torch.rand(4096, 8)}, without_weights / "model.safetensors")
    with pytest.raises(InputError, match=r"num_attention_heads=None in its config.json \(model_type=mamba\)"):
        stored(without_weights).require_weights()
