"""Which servers can serve a head, in each layout and with each option, and what the check says of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_head import IDS, LAYERS, Editable, as_speculators, edit_json, edit_tensors
from heads import make_head

from eagle3.head_files.files import read_files
from eagle3.head_files.format import save_head
from eagle3.head_files.servers import LLAMA_CPP, SGLANG, VLLM, obstacles, summary


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save(*, layout: str = "sglang", **options: Any) -> Path:
        head = make_head(**options).float()
        save_head(tmp_path, head, LAYERS if head.config.num_captured_layers == 3 else [1, *LAYERS], "float32")
        if layout == "speculators":
            edited = Editable(tmp_path)
            as_speculators(edited, torch.zeros(head.config.vocab_size, head.config.hidden_size))
            edited.save()
        return tmp_path

    return save


def unable(folder: Path) -> dict[str, str]:
    return {server: reasons[0] for server, reasons in obstacles(read_files(folder)).items() if reasons}


@pytest.mark.parametrize("options", [{}, {"norm_before_fc": True}, {"draft_vocab_size": 50}])
def test_an_export_of_eagle3_is_served_everywhere(options, save):
    folder = save(**options)
    assert unable(folder) == {}
    assert summary(read_files(folder)) == "SGLang, vLLM and llama.cpp can serve this head"


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fc_norm": True, "norm_output": True}, "it has no fc_norm and no norm_output (train with model=eagle3)"),
        ({"norm_output": True}, "it has no norm_output"),
        ({"num_captured_layers": 4}, "it reads exactly 3 captured layers, not 4"),
    ],
)
def test_llama_cpp_serves_plain_eagle3_of_three_layers_alone(layout, options, reason, save):
    found = unable(save(layout=layout, **options))
    assert reason in found.pop(LLAMA_CPP)
    assert found.keys() == ({SGLANG} if layout == "speculators" else set())


def test_sglang_does_not_read_the_layout_of_the_speculators(save):
    folder = save(layout="speculators")
    assert unable(folder).keys() == {SGLANG}
    assert summary(read_files(folder)).startswith("vLLM and llama.cpp can serve this head; SGLang cannot: it does not")
    edit_json(folder / "config.json", model_type="speculator_model")
    assert "remove that key" in unable(folder)[VLLM]
    edit_json(folder / "config.json", norm_output=True)
    assert summary(read_files(folder)).startswith("none of SGLang, vLLM, llama.cpp can serve this head; SGLang cannot")


def test_layers_that_are_named_in_eagle_config_alone_are_right_in_sglang_alone(save):
    folder = save()
    edit_json(folder / "config.json", IDS)
    found = unable(folder)
    assert found.keys() == {VLLM, LLAMA_CPP}
    assert "takes [1, 3, 4] for inputs of layers, one too low" in found[VLLM] and "to [2, 4, 5])" in found[VLLM]


def test_vllm_stops_at_a_map_of_the_whole_vocabulary(save):
    folder = save(draft_vocab_size=50)
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update(d2t=torch.zeros(50, dtype=torch.int64)))
    assert "it stops at a d2t of the whole vocabulary" in unable(folder)[VLLM]
