"""Which versions of SGLang can capture hidden states, by which of its private parts, and how the others are refused."""

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import eagle3_capture
import pytest
import torch
from serving_fixtures import sglang_site, sglang_source
from standin_engine import LogitsProcessor

from eagle3.engine.versions import (
    BATCH_FIELDS,
    CAPTURE_FLAGS,
    FLAGS,
    LOGITS_ARGUMENTS,
    capture_flags,
    logits_arguments,
    missing_parts,
    require_capture,
)
from eagle3.errors import InputError

SIZES: dict[str, Any] = {"dtype": "bfloat16", "batch_tokens": 512, "most_bytes": 1}


def installed(folder: Path, version: str) -> Path:
    return sglang_site(folder, version) / "sglang"


@pytest.mark.parametrize("version", ["0.5.17", "0.5.19.post1", "0.5.20", "0.5.23", "0.5.23.post2"])
def test_capture_takes_every_version_that_shows_its_hidden_states(tmp_path: Path, version: str) -> None:
    require_capture(installed(tmp_path, version), version)


@pytest.mark.parametrize("version", ["0.5.21", "0.5.22", "0.5.22.post1"])
def test_capture_refuses_0_5_21_and_0_5_22_by_name(tmp_path: Path, version: str) -> None:
    with pytest.raises(InputError, match=rf"in SGLang {version}: .*residual stream.*install SGLang 0\.5\.23"):
        require_capture(installed(tmp_path, version), version)


def test_a_version_newer_than_those_tried_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        require_capture(installed(tmp_path, "0.5.24"), "0.5.24")
    assert "SGLang 0.5.24 is newer than 0.5.23" in caplog.text


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20", "0.5.23"])
def test_each_part_that_capture_relies_on_is_named_when_it_is_missing(tmp_path: Path, version: str) -> None:
    folder = installed(tmp_path, version)
    for part in (*FLAGS, *(CAPTURE_FLAGS if version == "0.5.23" else ()), *BATCH_FIELDS, "class LogitsProcessor"):
        [path] = [folder / path for path, text in sglang_source(version).items() if part in text]
        text = path.read_text()
        path.write_text(text.replace(part, f"{part}_renamed"))
        [missing] = missing_parts(folder, version)
        assert part.removeprefix("class ") in missing and path.name in missing.replace("*", "exec_")
        with pytest.raises(InputError, match=f"in SGLang {version}: it has no .* in srt/"):
            require_capture(folder, version)
        path.write_text(text)


def test_another_order_of_arguments_is_refused(tmp_path: Path) -> None:
    folder = installed(tmp_path, "0.5.23")
    path = folder / "srt/layers/logits_processor.py"
    path.write_text(path.read_text().replace("hidden_states, lm_head,", "lm_head, hidden_states,"))
    assert [part.partition("(")[0] for part in missing_parts(folder, "0.5.23")] == ["LogitsProcessor.forward"]
    path.unlink()
    assert logits_arguments(folder) == ()


def test_the_stand_in_for_the_logits_processor_is_called_as_sglangs() -> None:
    assert tuple(inspect.signature(LogitsProcessor.forward).parameters)[: len(LOGITS_ARGUMENTS)] == LOGITS_ARGUMENTS


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

    hook(None, (None, torch.zeros(2, 4), None, Batch()), None)
    assert "did not see all rows" in (tmp_path / eagle3_capture.FAILED).read_text()
