"""What is known of a target without its weights is what is known with them."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from eagle3.target.facts import target_config
from eagle3.target.files import read_target_files
from eagle3.target.model import load_target
from tests.target.test_model import OPTIONS

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("eos", [None, 7, [7, 8]])
def test_the_files_alone_tell_what_the_loaded_target_does(
    tiny_path: Path, tmp_path: Path, eos: int | list[int] | None
) -> None:
    folder = Path(shutil.copytree(tiny_path, tmp_path / "target"))
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    files = read_target_files(path=str(folder), revision=None, trust_remote_code=False)
    target = load_target(path=str(folder), **OPTIONS)
    assert files.stop_ids == target.stop_ids == {2, *(eos if isinstance(eos, list) else [eos])} - {None}
    assert target_config(files.text_config, 512, None) == target_config(target.text_config, 512, None)
    assert files.checkpoint_dtype == target.checkpoint_dtype
    assert files.tokenizer.get_vocab() == target.tokenizer.get_vocab()


def test_a_hub_target_is_named_with_its_commit(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--team--tiny"
    shutil.copytree(tiny_path, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for revision in (None, COMMIT):
        assert read_target_files(path="team/tiny", revision=revision, trust_remote_code=False).commit == COMMIT
    assert load_target(path="team/tiny", **OPTIONS).identity.revision == COMMIT
    assert load_target(path=str(tiny_path), **OPTIONS).identity.revision is None
