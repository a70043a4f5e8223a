"""The target: loaded as its folder says, known by what it is, refused under the config key."""

import json
import re
import shutil

import pytest
import torch
import transformers
from exported_head import edit_json
from families import OPTIONS, TINY
from safetensors.torch import load_file, save_file
from scripts import composed
from stores import CONF

from eagle3.errors import InputError
from eagle3.settings.precomputing import TargetSettings
from eagle3.target.files import read_target_files
from eagle3.target.identity import require_same_target
from eagle3.target.model import load_target, require_loadable


@pytest.fixture
def tiny_copy(tmp_path):
    return shutil.copytree(TINY, tmp_path / "tiny")


def identity(path, **changes):
    return load_target(path=str(path), **{**OPTIONS, **changes}).identity


def test_identity_does_not_depend_on_folder_dtype_or_who_saved_it(tiny_copy):
    edit_json(tiny_copy / "config.json", transformers_version="4.40.0", torch_dtype="float32", use_cache=False)
    original, copy = identity(TINY), identity(tiny_copy, dtype="bfloat16")
    assert original.name != copy.name
    require_same_target(original, copy, expected_from="the store", actual_from="the run")


def test_identity_survives_use_of_the_tokenizer():
    target = load_target(path=str(TINY), **OPTIONS)
    target.tokenizer(["one", "and two"], padding=True, truncation=True, max_length=1)
    assert target.identity == identity(TINY)
    assert target.model.dtype == torch.float32  # dtype=auto on a CPU


def fine_tune(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[3].self_attn.q_proj.weight.data.mul_(1.01)  # as merging a small adapter does
    model.save_pretrained(folder / "tuned")
    shutil.copy(folder / "tuned/model.safetensors", folder)


def change_config(folder):
    edit_json(folder / "config.json", rms_norm_eps=1e-6)


def change_tokenizer(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def change_template(folder):
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")


@pytest.mark.parametrize(
    ("change", "part"),
    [(fine_tune, "weights"), (change_config, "config"), (change_tokenizer, "tokenizer"), (change_template, "template")],
)
def test_another_target_is_refused_and_the_part_that_differs_named(tiny_copy, change, part):
    change(tiny_copy)
    with pytest.raises(InputError, match=rf"the store was made with .* differ in {part};"):
        require_same_target(identity(TINY), identity(tiny_copy), expected_from="the store", actual_from="the run")


def remove(folder, *names):
    for name in names:
        (folder / name).unlink()


def drop_a_weight(folder):
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    del weights["model.layers.3.mlp.up_proj.weight"], weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def truncate_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def wrap_names(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({f"base_model.model.{name}": weight for name, weight in weights.items()}, folder / "model.safetensors")


def untie(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_as_pickle(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    remove(folder, "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "model.fp16.safetensors"),
            r"holds model\.fp16\.safetensors, and transformers reads only model\.safetensors, .*rename",
        ),
        (save_as_pickle, r"holds no \*\.safetensors"),
        (lambda folder: remove(folder, "config.json"), r"neither a model folder.*config\.json"),
        (lambda folder: edit_json(folder / "config.json", model_type="unheard_of"), r"neither a model folder"),
        (lambda folder: remove(folder, "tokenizer.json", "tokenizer_config.json"), r"no usable tokenizer"),
        (truncate_weights, r"model\.safetensors cannot be read .*fetch it again"),
        (wrap_names, r"lacks 75 weights, .*74 other tensors, e\.g\. base_model\.model\..* of a wrapper .*unwrap"),
        (untie, r"tie_word_embeddings=true .*lm_head differs from its embedding.*remove the lm_head"),
        (drop_a_weight, r"lacks 1 weights, e\.g\. model\.layers\.3\.mlp\.up_proj\.weight"),
        (
            lambda folder: edit_json(folder / "config.json", intermediate_size=500),
            r"down_proj\.weight: \[192, 512\] instead of \[192, 500\]",
        ),
        (
            lambda folder: edit_json(folder / "config.json", num_hidden_layers=6),
            r"config\.json says that the model has 6 layers, .* hold model\.layers\.6; correct num_hidden_layers",
        ),
    ],
)
def test_a_broken_folder_is_refused_under_the_config_key(tiny_copy, spoil, message):
    spoil(tiny_copy)
    with pytest.raises(InputError, match=rf"target\.path=.*{message}") as caught:
        load_target(path=str(tiny_copy), **OPTIONS)
    assert "target.attention" not in str(caught.value)  # which is named where it was set


def test_weights_that_transformers_does_not_look_for_are_refused_before_the_first_stage(tiny_copy):
    (tiny_copy / "model.safetensors").rename(tiny_copy / "model.fp16.safetensors")
    with pytest.raises(InputError, match=r"holds model\.fp16\.safetensors"):
        require_loadable(read_target_files(path=str(tiny_copy)), device="cpu")


def add_weights(folder, *names):
    weights = load_file(folder / "model.safetensors")
    weights |= {name: torch.ones(1) for name in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.up_proj.weight_scale", "layers.2.mlp.down_proj.scales", "lm_head.weight_scale"]
)
def test_a_tensor_that_a_computed_layer_would_do_without_is_refused(tiny_copy, name):
    add_weights(tiny_copy, name)
    with pytest.raises(InputError, match=rf"holds 1 tensors in layers .* e\.g\. (model\.)?{re.escape(name)}: .*give"):
        load_target(path=str(tiny_copy), **OPTIONS)


def test_tensors_of_parts_that_are_not_computed_are_no_fault(tiny_copy):
    elsewhere = ("model.layers.8.eh_proj.weight", "model.layers.8.mlp.up_proj.weight_scale", "mtp.norm.weight_scale")
    vision = ("vision_tower.layers.0.mlp.fc.weight_scale", "model.layers.0.self_attn.rotary_emb.inv_freq")
    add_weights(tiny_copy, *elsewhere, *vision)
    assert identity(tiny_copy).weights_hash == identity(TINY).weights_hash


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "/no/such/folder"}, r"target\.path=/no/such/folder does not exist"),
        ({"path": "~/models/mine"}, r"target\.path=~/models/mine does not exist; .*write \$HOME"),
        ({"device": "warp"}, r"target\.device=warp"),
        ({"attention": "warp"}, r"target\.attention=warp"),
    ],
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        load_target(**{"path": str(TINY), **OPTIONS, **changes})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing to fall back from")
@pytest.mark.gpu
def test_auto_takes_the_gpu_and_the_dtype_of_the_checkpoint():
    target = load_target(path=str(TINY), **{**OPTIONS, "device": "auto"})
    assert target.device.type == "cuda" and target.model.dtype == torch.bfloat16


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "target").glob("*.yaml")))
def test_every_target_option_sets_exactly_the_keys_that_load_target_takes(name):
    options = composed(f"target/{name}").target
    assert set(options) == set(TargetSettings.__annotations__)
    assert (options.path is None) == (name == "default")
