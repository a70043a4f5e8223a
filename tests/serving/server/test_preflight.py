"""What is looked at before a server starts: SGLang's version, its model classes, the head's files."""

from pathlib import Path

import pytest
import torch
from serving_fixtures import launch_settings, sglang_site

from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.serving.head.format import save_head
from eagle3.serving.server.preflight import (
    captures,
    check_files,
    find_sglang,
    numbers,
    require_capture,
    require_devices,
)
from eagle3.storage.files import read_json, write_json
from eagle3.target.facts import target_config
from eagle3.target.files import TargetFiles, read_target_files

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


@pytest.fixture
def target(tiny_path: Path) -> TargetFiles:
    return read_target_files(path=str(tiny_path), revision=None, trust_remote_code=False)


def test_the_installation_is_found_where_the_interpreter_would_import_it(tmp_path: Path) -> None:
    site = sglang_site(tmp_path)
    found = find_sglang(launch_settings(site))
    assert (found.version, found.folder) == ("0.5.17", site / "sglang")
    assert found.devices == torch.cuda.device_count()


@pytest.mark.parametrize("version", ["0.5.16", "0.4.9.post6"])
def test_an_old_sglang_is_one_line(tmp_path: Path, version: str) -> None:
    with pytest.raises(InputError, match=rf"has SGLang {version}, 0\.5\.17 is the oldest"):
        find_sglang(launch_settings(sglang_site(tmp_path, version)))


@pytest.mark.parametrize("version", ["0.5.17", "0.5.17.post1", "0.5.20rc1", "0.10.0", "1.0"])
def test_later_versions_are_taken(version: str) -> None:
    assert numbers(version) >= (0, 5, 17)


def test_an_environment_without_sglang_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"launch\.python=.* has no SGLang; install it there"):
        find_sglang(launch_settings(tmp_path, env=None))


def test_an_interpreter_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"launch\.python=/no/python cannot be run"):
        find_sglang(launch_settings(tmp_path, python="/no/python"))
    with pytest.raises(InputError, match=r"launch\.python=/bin/false has no working SGLang \(exit status 1\)"):
        find_sglang(launch_settings(tmp_path, python="/bin/false"))


def test_more_gpus_than_there_are_is_one_line(tmp_path: Path) -> None:
    site = sglang_site(tmp_path)
    too_many = torch.cuda.device_count() + 1
    with pytest.raises(InputError, match=rf"launch\.tp_size={too_many}: .* sees {too_many - 1} GPUs"):
        require_devices(find_sglang(launch_settings(site)), launch_settings(site, tp_size=too_many))


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


def test_a_target_that_sglang_cannot_capture_from_is_one_line(
    models: Path, target: TargetFiles, tmp_path: Path
) -> None:
    installation = find_sglang(launch_settings(models.parents[2]))
    require_capture(installation, target)
    (models / "llama.py").write_text("class LlamaForCausalLM:\n    pass\n")
    with pytest.raises(InputError, match=r"is a LlamaForCausalLM: SGLang 0\.5\.17 cannot capture"):
        require_capture(installation, target)


def test_the_heads_files_are_checked_without_the_targets_weights(target: TargetFiles, tmp_path: Path) -> None:
    facts = target_config(target.text_config, target.text_config.vocab_size, target.checkpoint_dtype)
    config = HeadConfig.for_target(facts, num_captured_layers=3, draft_vocab_size=32, fc_norm=False, norm_output=False)
    head = tmp_path / "head"
    head.mkdir()
    assert target.checkpoint_dtype is not None
    save_head(head, DraftHead(config, torch.arange(32)), [2, 4, 5], target.checkpoint_dtype)
    assert {finding.level for finding in check_files(str(head), target)} <= {"ok", "skipped"}
    config_json = read_json(head / "config.json", made_by="this test")
    write_json(head / "config.json", config_json | {"max_position_embeddings": 16})
    assert [finding.check for finding in check_files(str(head), target) if finding.level == "error"] == ["context"]
