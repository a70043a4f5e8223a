"""Heads to start a training from: each layout is read with its layers, each obstacle is named with its fix."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exported_head import (
    FINGERPRINT,
    IDS,
    Change,
    Editable,
    added,
    as_specforge,
    as_speculators,
    export_head,
    make_head_record,
    name_layers,
    setting,
)
from heads import make_head
from stores import TARGET_CONFIG, open_store, random_samples, write_store

from eagle3.errors import InputError
from eagle3.features.store import FeatureStore
from eagle3.head.draft_head import DraftHead
from eagle3.head_files.init_from import read_start
from eagle3.serving.head.export import TrainedHead
from eagle3.storage.files import sha256_file


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    return open_store(write_store(tmp_path / "features", random_samples(8)))


@pytest.fixture
def head() -> DraftHead:
    return make_head(norm_before_fc=True, norm_output=True).bfloat16().float()


@pytest.fixture
def exported(head: DraftHead, tmp_path: Path) -> Editable:
    trained = TrainedHead(head, make_head_record(head, FINGERPRINT, replace(TARGET_CONFIG, dtype="bfloat16")))
    export_head(trained, tmp_path / "head", versions={})
    return Editable(tmp_path / "head")


def as_nvidia(head: Editable) -> None:
    """Model-Optimizer's layout: layers named once, the norm before fc named in `eagle_config`."""
    head.training = None
    name_layers(head.config, [1, 3, 4], twice=False)
    head.config["eagle_config"]["norm_before_fc"] = head.config.pop("norm_before_fc")


def as_vllm(head: Editable) -> None:
    """The speculators' layout, whose layers are counted by their inputs."""
    as_speculators(head, torch.zeros(50, 16))
    del head.tensors["embed_tokens.weight"]


def in_another_order(head: Editable) -> None:
    head.training = None
    name_layers(head.config, [4, 3, 1])


LAYOUTS: dict[str, tuple[Change, list[int]]] = {
    "ours": (lambda head: None, [2, 4, 5]),
    "ours, before": (lambda head: name_layers(head.config, [1, 3, 4], twice=False), [2, 4, 5]),
    "ours, without its record": (lambda head: setattr(head, "training", None), [2, 4, 5]),
    "in another order": (in_another_order, [5, 4, 2]),
    "SpecForge": (as_specforge, [2, 4, 5]),
    "NVIDIA": (as_nvidia, [2, 4, 5]),
    "speculators": (as_vllm, [2, 4, 5]),
    "speculators, other layers": (lambda head: (as_vllm(head), head.config.update({IDS: [1, 3, 4]})), [1, 3, 4]),
    "speculators, flat": (lambda head: (as_specforge(head), head.config.update({IDS: [2, 4, 5]})), [2, 4, 5]),
}


@pytest.mark.parametrize(("change", "layers"), LAYOUTS.values(), ids=LAYOUTS)
def test_heads_of_every_layout_are_read_with_the_layers_of_their_training(change, layers, exported, head, store):
    change(exported)
    exported.save()
    start = read_start(str(exported.path), store)
    assert start.head.config == head.config
    torch.testing.assert_close(start.head.state_dict(), head.state_dict(), rtol=0, atol=0)
    assert start.capture_layers == layers
    names = ("config.json", "model.safetensors")
    assert start.files == {name: sha256_file(exported.path / name) for name in names}


@pytest.mark.parametrize("part", ["weights", "tokenizer", "template"])
def test_a_head_of_another_target_is_read_with_a_warning_that_says_how_it_differs(exported, store, caplog, part):
    read_start(str(exported.path), store)
    assert not caplog.text
    assert exported.training is not None
    exported.training["origin"]["target"][f"{part}_hash"] = "other"
    exported.save()
    read_start(str(exported.path), store)
    assert "/head was trained on tiny, data.path=" in caplog.text
    assert f"is of random: they differ in {part}, and the head adapts to that" in caplog.text


def test_a_head_whose_files_leave_open_what_its_trainer_computed_is_read_with_a_warning(exported, store, caplog):
    exported.training = None
    exported.config["norm_output"] = True
    exported.save()
    read_start(str(exported.path), store)
    assert re.search(r"init_from=\S+/head: norm_output=true: .*a head of SpecForge.*remove the key", caplog.text)


OBSTACLES: list[tuple[Change, str]] = [
    (setting(hidden_act="gelu"), "hidden_act=gelu: SGLang supports only silu and will not start; choose another head"),
    (setting(norm_before_residual=True), "norm_before_residual=true: .*; train with norm_before_residual=false"),
    (added("midlayer.self_attn.q_norm.weight", 8), "q_norm.weight is unknown: .*; train without it"),
    (lambda head: head.tensors.update(d2t=head.tensors["d2t"] + torch.arange(30)), "d2t holds target ids"),
    (
        lambda head: head.tensors.update({"embed_tokens.weight": torch.ones(50, 16)}),
        "embed_tokens.weight differs from the target's in 50 of 50 rows: .*; train with frozen embeddings",
    ),
]


@pytest.mark.parametrize(("change", "message"), OBSTACLES, ids=[message for _, message in OBSTACLES])
def test_what_the_training_would_not_compute_is_refused(change, message, exported, store):
    exported.training = None
    change(exported)
    exported.save()
    with pytest.raises(InputError, match=rf"^init_from=\S+/head: .*{message}"):
        read_start(str(exported.path), store)


def test_files_that_are_missing_or_not_those_of_the_export_are_named(exported, store):
    with pytest.raises(InputError, match=r"^init_from=nowhere: nowhere/config\.json"):
        read_start("nowhere", store)
    (exported.path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"^init_from=\S+/head: \S+config\.json is not the file that was exported"):
        read_start(str(exported.path), store)
