"""What is known of a target without its weights is what is known with them."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from families import OPTIONS
from transformers import AutoTokenizer

from eagle3.errors import InputError
from eagle3.target.files import read_target_files
from eagle3.target.model import load_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"
URL = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"


@pytest.mark.parametrize("eos", [None, 7, [7, 8]])
def test_stop_ids_join_those_of_the_generation_config_and_the_tokenizer(
    without_weights: Path, eos: int | list[int] | None
) -> None:
    if eos is not None:
        (without_weights / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    files = read_target_files(path=str(without_weights))
    assert files.stop_ids == {2, *(eos if isinstance(eos, list) else [eos])} - {None}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty, on a machine where nothing answers at the hub's address."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", URL)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return tmp_path


def fill(cache: Path, tiny_path: Path) -> None:
    cached = cache / "models--team--tiny"
    shutil.copytree(tiny_path, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)


def test_a_model_that_is_nowhere_is_one_line_after_one_request(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        InputError, match=r"target\.path=team/tiny is no folder, not in the cache .*127\.0\.0\.1:9 cannot"
    ):
        read_target_files(path="team/tiny")
    assert caplog.messages == []


def test_a_cached_model_is_read_where_the_hub_cannot_be_reached(
    cache: Path, tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(cache, tiny_path)
    for _ in range(2):
        read_target_files(path="team/tiny")
    [line] = caplog.messages
    assert "127.0.0.1:9 cannot be reached" in line and f"read from the cache {cache}" in line
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # for servers


def test_a_hub_target_is_named_with_its_commit(cache: Path, tiny_path: Path) -> None:
    fill(cache, tiny_path)
    for revision in (None, COMMIT):
        assert read_target_files(path="team/tiny", revision=revision).commit == COMMIT
    assert load_target(path="team/tiny", **OPTIONS).identity.revision == COMMIT
    assert load_target(path=str(tiny_path), **OPTIONS).identity.revision is None


def test_a_tokenizer_may_have_tokens_beyond_the_embedding(without_weights: Path) -> None:
    """As gemma-3-1b-it has: no text holds them, and the model was published so."""
    tokenizer = AutoTokenizer.from_pretrained(without_weights)
    tokenizer.add_tokens(["<image_soft_token>"])
    tokenizer.save_pretrained(without_weights)
    files = read_target_files(path=str(without_weights))
    assert len(files.tokenizer) == files.text_config.vocab_size + 1
