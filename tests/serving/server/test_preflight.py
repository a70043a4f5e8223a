"""What is looked at before a server starts: SGLang's version, its model classes, the head's files."""

from pathlib import Path

import pytest
from serving_fixtures import launch_settings, sglang_site

from eagle3.engine.installation import find_sglang
from eagle3.errors import InputError
from eagle3.serving.server.launch import check_files, require_capture
from eagle3.storage.files import read_json, write_json
from eagle3.target.files import TargetFiles

MODELS = {
    "llama.py": "class LlamaForCausalLM(nn.Module):\n    def set_eagle3_layers_to_capture(self, ids): ...\n",
    "phi3.py": "class Phi3ForCausalLM(llama.LlamaForCausalLM):\n    pass\n",
    "mistral.py": "class Mistral3ForConditionalGeneration:\n    def __getattr__(self, name): ...\n",
    "opt.py": "class OPTForCausalLM(nn.Module):\n    def forward(self): ...\n",
    "loop.py": "class Loop(Loop):\n    pass\n",
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = sglang_site(tmp_path) / "sglang" / "srt" / "models"
    folder.mkdir(parents=True)
    for name, text in MODELS.items():
        (folder / name).write_text(text)
    return folder


def test_a_target_that_sglang_cannot_capture_from_is_one_line(
    models: Path, target_files: TargetFiles, tmp_path: Path
) -> None:
    installation = find_sglang(launch_settings(models.parents[2]))
    require_capture(installation, target_files)
    (models / "llama.py").write_text("class LlamaForCausalLM:\n    pass\n")
    with pytest.raises(InputError, match=r"is a LlamaForCausalLM: SGLang 0\.5\.17 cannot capture"):
        require_capture(installation, target_files)


def test_the_heads_files_are_checked_without_the_targets_weights(target_files: TargetFiles, exported: Path) -> None:
    assert {finding.level for finding in check_files(str(exported), target_files)} <= {"ok", "skipped"}
    config_json = read_json(exported / "config.json", made_by="this test")
    write_json(exported / "config.json", config_json | {"max_position_embeddings": 16})
    assert [finding.check for finding in check_files(str(exported), target_files) if finding.level == "error"] == [
        "context"
    ]
