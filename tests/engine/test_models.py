"""Which model classes SGLang captures hidden states from, by the source of a version."""

from pathlib import Path

import pytest

from eagle3.engine.models import captures

MODELS = {
    "llama.py": "class LlamaForCausalLM(nn.Module):\n    def set_eagle3_layers_to_capture(self, ids): ...\n",
    "phi3.py": "class Phi3ForCausalLM(llama.LlamaForCausalLM):\n    pass\n",
    "mistral.py": "class Mistral3ForConditionalGeneration:\n    def __getattr__(self, name): ...\n",
    "opt.py": "class OPTForCausalLM(nn.Module):\n    def forward(self): ...\n",
    "loop.py": "class Loop(Loop):\n    pass\n",
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name, text in MODELS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("architecture", "can"),
    [
        ("LlamaForCausalLM", True),
        ("Phi3ForCausalLM", True),  # inherits it
        ("Mistral3ForConditionalGeneration", True),  # passes it on
        ("OPTForCausalLM", False),
        ("Loop", False),
        ("NewForCausalLM", None),
        (None, None),
    ],
)
def test_whether_a_model_class_can_be_captured_from_is_read_in_its_source(
    models: Path, architecture: str | None, can: bool | None
) -> None:
    assert captures(models, architecture) is can


def test_nothing_is_claimed_of_sources_that_cannot_be_read(models: Path) -> None:
    (models / "opt.py").write_bytes("\ufeffclass OPTForCausalLM:\n    pass\n".encode())
    assert captures(models, "OPTForCausalLM") is False
    (models / "new.py").write_text("class of a newer Python")
    assert captures(models, "OPTForCausalLM") is None
