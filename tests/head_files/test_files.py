"""A head's folder: what is read of it, and one clear line for what cannot be."""

import json
from pathlib import Path

import pytest
import torch
from exported_head import IDS, Editable, as_speculators, name_layers, replace_file
from heads import make_head
from safetensors.torch import load_file, save_file

from eagle3.errors import InputError
from eagle3.head_files.files import INDEX, plain_name, read_files
from eagle3.head_files.format import load_head, save_head
from eagle3.storage.files import write_json


@pytest.fixture
def head(tmp_path: Path) -> Path:
    save_head(tmp_path / "head", make_head().float(), [2, 4, 5], "float32")
    return tmp_path / "head"


def split(head: Path) -> list[str]:
    """Into two shards with an index, as transformers writes them; a stale whole file stays beside them."""
    tensors = load_file(head / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, head / shard)
    write_json(head / INDEX, {"weight_map": {name: shard for shard, held in shards.items() for name in held}})
    replace_file({"fc.weight": torch.zeros(1), "stale": torch.zeros(1)}, head / "model.safetensors")
    return [*shards]


def test_the_index_decides_which_shards_are_read(head: Path) -> None:
    whole = read_files(head).tensors
    split(head)
    sharded = read_files(head).tensors
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_a_missing_shard_is_named(head: Path) -> None:
    (head / split(head)[1]).unlink()
    with pytest.raises(InputError, match=r"index\.json names model-00002-of-00002\.safetensors, which does not exist"):
        read_files(head)
    for empty in ({}, {"weight_map": {}}, {"weight_map": ["model.safetensors"]}):
        write_json(head / INDEX, empty)
        with pytest.raises(InputError, match=r"index\.json names no file"):
            read_files(head)


def test_pickles_are_refused_with_the_reason_and_the_fix(head: Path) -> None:
    torch.save(load_file(head / "model.safetensors"), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no \*\.safetensors file; pytorch_model\.bin is a pickle, .* not read: conv"):
        read_files(head)
    (head / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"no \*\.safetensors file; make it: python serve\.py action=export"):
        read_files(head)


def test_a_truncated_tensor_file_is_named(head: Path) -> None:
    content = (head / "model.safetensors").read_bytes()
    for length in (0, 7, len(content) // 2):
        (head / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(InputError, match=r"model\.safetensors is truncated or damaged .*; copy it again"):
            read_files(head)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"a": "\xff"}'])
def test_odd_json_is_one_clear_line(content: bytes, head: Path) -> None:
    (head / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json (is not valid JSON|holds no object)"):
        read_files(head)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("hidden_size", "16", "a whole number from 1"),
        ("num_attention_heads", 0, "a whole number from 1"),
        ("max_position_embeddings", 4096.0, "a whole number from 1"),
        ("rope_scaling", "linear", "an object"),
        ("transformer_layer_config", [], "an object"),
        ("rope_theta", "10000", "a number"),
        ("dtype", ["bfloat16"], "a word"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(key: str, value: object, rule: str, head: Path) -> None:
    write_json(head / "config.json", json.loads((head / "config.json").read_text()) | {key: value})
    with pytest.raises(InputError, match=rf"{key}=.* in config\.json must be {rule}; correct it"):
        read_files(head)


def test_a_nested_setting_of_the_wrong_kind_is_named(head: Path) -> None:
    write_json(head / "config.json", {"transformer_layer_config": {"hidden_size": "16"}})
    with pytest.raises(InputError, match=r"hidden_size='16' in config\.json must be a whole number from 1"):
        read_files(head)


def test_a_training_json_of_another_program_is_named(head: Path) -> None:
    assert read_files(head).record is None
    write_json(head / "training.json", {"epochs": 3})
    with pytest.raises(InputError, match=r"training\.json: format_version is missing; export the head again"):
        read_files(head)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone/config\.json does not exist"):
        read_files(tmp_path / "gone")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        ("layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"),
        ("layers.1.hidden_norm.weight", "layers.1.hidden_norm.weight"),
        ("model.fc.weight", "fc.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight"),
        ("model.lm_head.weight", "model.lm_head.weight"),  # SGLang does not find it
    ],
)
def test_tensors_have_the_names_under_which_sglang_finds_them(theirs: str, ours: str) -> None:
    assert plain_name(theirs) == ours


def test_a_head_of_the_speculators_gives_the_same_logits(head: Path) -> None:
    before = load_head(head)
    editable = Editable(head)
    as_speculators(editable, torch.zeros(50, 16))
    editable.save()
    files = read_files(head)
    assert (files.nested, files.layer_ids, files.top_level_ids) == (True, None, [2, 4, 5])
    after = load_head(head, num_layers=8)
    torch.testing.assert_close(after.head.state_dict(), before.head.state_dict(), rtol=0, atol=0)
    assert after.head.config == before.head.config


def test_a_head_of_the_speculators_reads_the_layers_that_vllm_captures_for_it(head: Path) -> None:
    editable = Editable(head)
    as_speculators(editable, torch.zeros(50, 16))
    editable.config[IDS] = [1, 3, 6]
    editable.save()
    assert load_head(head).capture_layers == load_head(head, num_layers=8).capture_layers == [1, 3, 6]
    del editable.config[IDS]
    editable.save()
    assert load_head(head, num_layers=8).capture_layers == [2, 4, 5]  # the default for 8 layers
    with pytest.raises(InputError, match=r"config\.json lacks eagle_config"):
        load_head(head)


def test_served_layers_are_those_that_sglang_captures(head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    del config[IDS]
    write_json(head / "config.json", config | {"eagle_config": {IDS: [8, 1, 5]}})
    assert read_files(head).served_layers(12) == [2, 6, 9]
    for eagle_config in (None, {}, "none", {IDS: None}):
        write_json(head / "config.json", config | {"eagle_config": eagle_config})
        assert read_files(head).served_layers(32) == [2, 16, 29]
    for ids in ([1, 5], [1, 5, 5], [1, 5, 11], [-1, 5, 8]):
        write_json(head / "config.json", config | {"eagle_config": {IDS: ids}})
        with pytest.raises(InputError, match=r"are not 3 different ones from 0 to 10 of the target's 12 layers"):
            read_files(head).served_layers(12)


@pytest.mark.parametrize("twice", [True, False], ids=["in both places", "in eagle_config alone"])
def test_layers_that_are_named_once_or_twice_are_read_the_same(twice: bool, head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    name_layers(config, [0, 3, 5], twice=twice)
    write_json(head / "config.json", config)
    files = read_files(head)
    assert files.stated_layers == files.served_layers(8) == files.trained_layers(8) == [1, 4, 6]


@pytest.mark.parametrize("ids", [[1, 3, 4], [2, 4, 6], [5, 4, 2], [2, 4], []])
def test_two_places_that_name_different_layers_are_refused_in_one_line(ids: list[int], head: Path) -> None:
    write_json(head / "config.json", json.loads((head / "config.json").read_text()) | {IDS: ids})
    with pytest.raises(InputError) as refused:
        read_files(head)
    assert f"head={head}: eagle_config.{IDS}=[1, 3, 4] and {IDS}={ids} at the top level" in str(refused.value)
    assert "name different layers" in str(refused.value) and "\n" not in str(refused.value)
