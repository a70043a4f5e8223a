"""The SGLang that launch.python finds: which versions are taken, which capture hidden states, and in which way."""

import json
import logging
from pathlib import Path
from typing import Any

import eagle3_capture
import pytest
import torch
from serving_fixtures import launch_settings, sglang_site

from eagle3.engine.versions import capture_flags, count_gpus, find_sglang, require_capture, takes_ids_for_inputs
from eagle3.errors import InputError

SIZES: dict[str, Any] = {"dtype": "bfloat16", "batch_tokens": 512, "most_bytes": 1}


@pytest.mark.parametrize("version", ["0.5.17.post1", "0.10.0"])
def test_the_installation_is_found_where_the_interpreter_would_import_it(tmp_path, version):
    assert find_sglang(launch_settings(sglang_site(tmp_path, version))) == version


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, r"has SGLang 0\.5\.16\.post6, the oldest supported is 0\.5\.17"),
        ({"env": None}, r"launch\.python=.* has no SGLang; install it there"),
        ({"python": "/bin/false"}, r"launch\.python=/bin/false has no working SGLang \(exit status 1\)"),
    ],
)
def test_an_old_sglang_or_none_is_one_line(tmp_path, settings, line):
    with pytest.raises(InputError, match=line):
        find_sglang(launch_settings(sglang_site(tmp_path, "0.5.16.post6"), **settings))


def test_more_gpus_than_there_are_is_one_line(tmp_path):
    gpus = torch.cuda.device_count()
    settings = launch_settings(sglang_site(tmp_path), tp_size=gpus + 1)
    for servers, each in ((1, ""), (2, " for each of 2 servers")):
        with pytest.raises(InputError, match=rf"launch\.tp_size={gpus + 1}{each}: PyTorch of .* sees {gpus} GPUs"):
            count_gpus(settings, servers=servers)


def test_gpus_are_counted_once(tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho >> {tmp_path}/asked\necho 2\n")
    python.chmod(0o755)
    settings = launch_settings(tmp_path, python=str(python))
    assert [count_gpus(settings), count_gpus(settings, servers=2)] == [2, 2]
    assert (tmp_path / "asked").read_text() == "\n"


@pytest.mark.parametrize("version", ["0.5.21", "0.5.22.post1"])
def test_capture_refuses_0_5_21_and_0_5_22_by_name(version):
    with pytest.raises(InputError, match=rf"in SGLang {version}: .*residual stream.*install SGLang 0\.5\.17"):
        require_capture(version)


def test_capture_takes_all_other_versions_and_warns_of_those_newer_than_tried(caplog):
    with caplog.at_level(logging.WARNING):
        for version in ("0.5.17", "0.5.19.post1", "0.5.20", "0.5.23", "0.5.23.post2"):
            require_capture(version)
        assert not caplog.records
        require_capture("0.5.24")
    assert "SGLang 0.5.24 is newer than 0.5.23" in caplog.text


@pytest.mark.parametrize(
    ("version", "module", "factories"),
    [("0.5.20", "eagle3_layers", ["layer", "layer", "layer", "logits"]), ("0.5.23", "eagle3_capture", ["logits"])],
)
def test_the_flags_name_hooks_that_exist_and_the_layer_before_the_captured_input(version, module, factories):
    flags = capture_flags(version, [2, 4, 5], Path("/memory"), **SIZES)
    hooks = json.loads(flags["forward-hooks"])
    assert [hook["hook_factory"] for hook in hooks] == [f"{module}:{name}" for name in factories]
    assert all(callable(getattr(__import__(module), name)) for name in factories)
    modules = [hook["target_modules"][0] for hook in hooks]
    assert modules == [*(f"*layers.{layer}" for layer in (1, 3, 4)[: len(hooks) - 1]), "*logits_processor"]
    if version == "0.5.23":
        assert flags["return-aux-hidden-state-layer-ids"] == [1, 3, 4]
        assert flags["enable-return-aux-hidden-states"] is True


def test_a_model_that_hands_over_no_states_is_reported_and_not_skipped(tmp_path):
    hook = eagle3_capture.logits({"folder": str(tmp_path), "dtype": "float32", "most_bytes": 1, "slots": 1})

    class Batch:
        class forward_mode:
            is_extend = staticmethod(lambda: True)

        rids, extend_seq_lens_cpu, extend_prefix_lens_cpu = ["eagle3:0:"], [2], [0]

    arguments = None, torch.zeros(2, 4), None, Batch()
    for aux, reason in [((), "did not see all rows"), ((torch.zeros(2, 12),), "are 12 wide, not those of 1 layers")]:
        hook(None, (*arguments, *aux), None)
        assert reason in (tmp_path / eagle3_capture.FAILED).read_text()


@pytest.mark.parametrize(
    ("model_type", "by_first"),
    [
        ("deepseek_v3", True),
        ("glm4_moe_lite", True),
        ("mistral_large_3", True),
        ("glm4_moe", False),
        ("mistral", False),
    ],
)
def test_targets_whose_layer_ids_sglang_reads_by_the_first_one(model_type, by_first):
    assert takes_ids_for_inputs(model_type, [2, 4, 6]) == by_first
    assert not takes_ids_for_inputs(model_type, [1, 4, 6])
