"""A head's folder: what is read of it, in every layout, and one clear line for what cannot be."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported_head import IDS, Editable, as_speculators, edit_json, edit_tensors, name_layers, replace_file
from heads import make_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.errors import InputError
from eagle3.head_files.files import INDEX, read_files, read_without_weights
from eagle3.head_files.format import load_head, save_head
from eagle3.storage.files import write_json

Change = Callable[[Path], object]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    save_head(tmp_path / "head", make_head().float(), [2, 4, 5], "float32")
    return tmp_path / "head"


def split(head: Path) -> list[str]:
    """Into two shards with an index, as transformers writes them; a stale whole file stays next to them."""
    tensors = load_file(head / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, head / shard)
    write_json(head / INDEX, {"weight_map": {name: shard for shard, held in shards.items() for name in held}})
    replace_file({"fc.weight": torch.zeros(1), "stale": torch.zeros(1)}, head / "model.safetensors")
    return [*shards]


def test_the_index_decides_which_shards_are_read(head):
    whole = read_files(head)
    assert whole.record is None
    split(head)
    torch.testing.assert_close(read_files(head).tensors, whole.tensors, rtol=0, atol=0)


def test_files_that_macos_adds_to_a_copy_are_not_read(head):
    (head / "._model.safetensors").write_bytes(b"\0\5\x16\7")
    assert "fc.weight" in read_files(head).tensors


def file(name: str, content: bytes) -> Change:
    return lambda head: (head / name).write_bytes(content)


def config(**changes: object) -> Change:
    return lambda head: edit_json(head / "config.json", **changes)


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Change:
    return lambda head: edit_tensors(head / "model.safetensors", change)


def d2t(ids: list[int]) -> Change:
    return tensors(lambda stored: stored.update(d2t=torch.tensor(ids) - torch.arange(len(ids))))


def cut_to(length: int) -> Change:
    return lambda head: file("model.safetensors", (head / "model.safetensors").read_bytes()[:length])(head)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("blobs/1f3a")


def layer_ids(*outputs: int) -> Change:
    return lambda head: config(**{"eagle_config": {IDS: [*outputs]}, IDS: [layer + 1 for layer in outputs]})(head)


TWICE = rf"head=\S+: eagle_config\.{IDS}=\[1, 3, 4\] and {IDS}=\[.*\] at the top level .* name different layers"
REFUSED: list[tuple[Change, str]] = [
    (shutil.rmtree, r"head/config\.json does not exist"),
    (file("config.json", b"{"), r"config\.json is not valid JSON"),
    (
        lambda head: shutil.copy(head / "model.safetensors", head / "model (1).safetensors"),
        r"model\.safetensors has d2t, which another file of the folder has too, .*; move away the file",
    ),
    (lambda head: replace_by_link(head / "model.safetensors"), r"model\.safetensors is .* \(No such .*; copy it again"),
    (file("training.json", b'{"epochs": 3}'), r"training\.json: format_version is missing; export the head again"),
    (lambda head: (head / split(head)[1]).unlink(), r"index\.json names model-00002-\S+, which does not exist"),
    *((cut_to(length), r"model\.safetensors is truncated or damaged .*; copy it again") for length in (0, 5000)),
    (
        lambda head: (head / "model.safetensors").unlink(),
        r"no \*\.safetensors file; make it: python serve\.py action.* pickle .* not read: convert it on a safe machine",
    ),
    *((config(**{IDS: ids}), TWICE) for ids in ([1, 3, 4], [5, 4, 2], [2, 4])),
    *(
        (layer_ids(*ids), r"are not 3 different ones from 0 to 6 of the target's 8 layers")
        for ids in ((1, 5), (1, 5, 5), (1, 5, 7))
    ),
    (config(num_key_value_heads=1), r"k_proj\.weight must have shape \(8, 32\) by"),  # one is allowed
    (tensors(lambda stored: stored.pop("fc.weight")), r"fc\.weight must have shape \(16, 48\) by .* has nothing"),
    (
        tensors(lambda stored: stored.update({"model.lm_head.weight": stored.pop("lm_head.weight")})),
        r"lm_head\.weight must have shape \(30, 16\) by .* has nothing",  # SGLang does not find it either
    ),
    (tensors(lambda stored: stored.pop("d2t")), "has no tensor d2t, so its 30 draft ids cannot be mapped to tokens"),
    *((d2t(ids), "d2t does not map 30 draft ids") for ids in ([*range(29), 50], [*range(31)], [-1, *range(1, 30)])),
    (
        tensors(lambda stored: stored["lm_head.weight"][7].fill_(torch.nan)),
        r"lm_head\.weight holds 16 non-finite values in",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_folder_that_cannot_be_read_is_refused_in_one_line(change, message, head):
    change(head)
    with pytest.raises(InputError, match=message) as refused:
        load_head(head, num_layers=8)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("read", [read_files, read_without_weights])
def test_the_name_of_a_head_on_the_hub_is_told_how_to_get_it(read):
    with pytest.raises(InputError, match=r"head=team/Head-8B\.v1 is no folder here; .*hf download team/Head-8B\.v1 "):
        read("team/Head-8B.v1")


def test_a_head_of_the_speculators_is_read_with_the_layers_that_vllm_captures_for_it(head):
    """tests/head_files/test_init_from.py reads its weights."""
    editable = Editable(head)
    as_speculators(editable, torch.zeros(50, 16))
    editable.save()
    files = read_files(head)
    assert (files.nested, files.layer_ids, files.top_level_ids) == (True, None, [2, 4, 5])
    editable.config[IDS] = [1, 3, 6]
    editable.save()
    assert load_head(head, num_layers=8).capture_layers == [1, 3, 6]
    del editable.config[IDS]
    editable.save()
    assert load_head(head, num_layers=8).capture_layers == [2, 4, 5]  # the default for 8 layers


@pytest.mark.parametrize("twice", [True, False], ids=["in both places", "in eagle_config alone"])
def test_layers_that_are_named_once_or_twice_are_read_the_same(twice, head):
    edited = Editable(head)
    name_layers(edited.config, [0, 3, 5], twice=twice)
    edited.save()
    files = read_files(head)
    assert files.served_layers(8) == files.trained_layers(8) == [1, 4, 6]


def test_served_layers_are_those_that_sglang_captures(head):
    edit_json(head / "config.json", IDS, eagle_config={IDS: [8, 1, 5]})
    assert read_files(head).served_layers(12) == [2, 6, 9]
    for eagle_config in (None, {}, {IDS: None}):
        edit_json(head / "config.json", eagle_config=eagle_config)
        assert read_files(head).served_layers(32) == [2, 16, 29]
