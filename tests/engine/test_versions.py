"""Which versions of SGLang can capture hidden states, and how the others are refused."""

import json
import logging
from pathlib import Path
from typing import Any

import eagle3_capture
import pytest
import torch

from eagle3.engine.versions import capture_flags, require_capture
from eagle3.errors import InputError

SIZES: dict[str, Any] = {"dtype": "bfloat16", "batch_tokens": 512, "most_bytes": 1}


@pytest.mark.parametrize("version", ["0.5.17", "0.5.19.post1", "0.5.20", "0.5.23", "0.5.23.post2"])
def test_capture_takes_every_version_that_shows_its_hidden_states(version: str) -> None:
    require_capture(version)


@pytest.mark.parametrize("version", ["0.5.21", "0.5.22", "0.5.22.post1"])
def test_capture_refuses_0_5_21_and_0_5_22_by_name(version: str) -> None:
    with pytest.raises(InputError, match=rf"in SGLang {version}: .*residual stream.*install SGLang 0\.5\.23"):
        require_capture(version)


def test_a_version_newer_than_those_tried_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        require_capture("0.5.24")
    assert "SGLang 0.5.24 is newer than 0.5.23" in caplog.text


@pytest.mark.parametrize(
    ("version", "factories"), [("0.5.20", ["layer", "layer", "layer", "logits"]), ("0.5.23", ["logits"])]
)
def test_the_flags_name_hooks_that_exist(version: str, factories: list[str]) -> None:
    flags = capture_flags(version, [2, 4, 5], Path("/memory"), **SIZES)
    module = "eagle3_layers" if version == "0.5.20" else "eagle3_capture"
    hooks = json.loads(flags["forward-hooks"])
    assert [hook["hook_factory"] for hook in hooks] == [f"{module}:{name}" for name in factories]
    for hook in hooks:
        assert callable(getattr(__import__(module), hook["hook_factory"].partition(":")[2]))


def test_both_ways_name_the_layer_before_the_captured_input() -> None:
    hooks = json.loads(capture_flags("0.5.17", [2, 4, 5], Path("/memory"), **SIZES)["forward-hooks"])
    assert [hook["target_modules"][0] for hook in hooks] == ["*layers.1", "*layers.3", "*layers.4", "*logits_processor"]
    flags = capture_flags("0.5.23", [2, 4, 5], Path("/memory"), **SIZES)
    assert flags["return-aux-hidden-state-layer-ids"] == [1, 3, 4] and flags["enable-return-aux-hidden-states"] is True


def test_a_model_that_hands_over_no_states_is_reported_and_not_skipped(tmp_path: Path) -> None:
    hook = eagle3_capture.logits({"folder": str(tmp_path), "dtype": "float32", "most_bytes": 1, "slots": 1})

    class Batch:
        class forward_mode:
            is_extend = staticmethod(lambda: True)

        rids, extend_seq_lens_cpu, extend_prefix_lens_cpu = ["eagle3:0:"], [2], [0]

    arguments = None, torch.zeros(2, 4), None, Batch()
    for aux, reason in [((), "did not see all rows"), ((torch.zeros(2, 12),), "are 12 wide, not those of 1 layers")]:
        hook(None, (*arguments, *aux), None)
        assert reason in (tmp_path / eagle3_capture.FAILED).read_text()
