"""A target of the hub is fetched once, of one commit and without its other formats, or is one line of an error."""

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_hub import TOKEN, FakeHub, serving_hub
from families import OPTIONS
from huggingface_hub import constants
from safetensors.torch import load, load_file, save, save_file

from eagle3.commands.precompute import STAGES, check_ahead
from eagle3.compose import compose_run
from eagle3.errors import InputError
from eagle3.settings.precomputing import PrecomputeRun
from eagle3.target import hub as of_the_hub
from eagle3.target.identity import require_same_target
from eagle3.target.model import load_target
from eagle3.target.stored import stored_target

NAME, WEIGHTS = "team/tiny", "model.safetensors"
OTHER_FORMATS = ("pytorch_model.bin", "original/consolidated.00.pth", "original/model.safetensors", "tiny.gguf",
                 "consolidated.safetensors", "onnx/model.onnx")  # fmt: skip


@pytest.fixture
def hub(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has the bundled target, in other formats too, and an empty cache."""
    with serving_hub() as serving:
        serving.push(NAME, tiny_path, dict.fromkeys(OTHER_FORMATS, b"x"))
        for name, value in {
            "ENDPOINT": serving.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": serving.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        of_the_hub.fetch_texts.cache_clear()
        yield serving
        of_the_hub.fetch_texts.cache_clear()


def new_process(hub: FakeHub, *, offline: bool = False) -> None:
    of_the_hub.fetch_texts.cache_clear()
    constants.HF_HUB_OFFLINE = offline
    hub.asked.clear()


def compose_precompute(*overrides: str) -> PrecomputeRun:
    here = ("prompts.path=x", "out_dir=x", "answers=huggingface", "features=huggingface")
    return compose_run("precompute", f"target.path={NAME}", *here, *overrides)


def test_a_target_is_fetched_once_without_its_other_formats(hub, tiny_path):
    target = load_target(path=NAME, **OPTIONS)
    fetched = [line.partition("/resolve/")[2].partition("/")[2] for line in hub.asked if line.startswith("GET")]
    assert sorted(filter(None, fetched)) == sorted(path.name for path in tiny_path.iterdir())
    own = load_target(path=str(tiny_path), **OPTIONS).identity
    assert replace(target.identity, name="", revision=None) == replace(own, name="")
    hub.asked.clear()
    assert load_target(path=NAME, **OPTIONS).identity == target.identity
    assert hub.asked == []
    new_process(hub)
    assert stored_target(path=NAME).identity == target.identity
    assert [line for line in hub.asked if "/resolve/" in line] == []
    new_process(hub, offline=True)
    assert load_target(path=NAME, **OPTIONS).identity == target.identity
    assert hub.asked == []


def test_only_the_files_of_the_index_are_fetched(hub, tiny_path, tmp_path):
    sharded, tensors = tmp_path / "sharded", load_file(tiny_path / WEIGHTS)
    shutil.copytree(tiny_path, sharded, ignore=shutil.ignore_patterns(WEIGHTS))
    file_of = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(tensors)}
    for file in {*file_of.values()}:
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    hub.push("team/sharded", sharded, {"consolidated.safetensors": b"x"})
    target = stored_target(path="team/sharded")
    target.require_weights()
    assert {path.name for path in target.folder.glob("*.safetensors")} == {*file_of.values()}
    assert target.identity.weights_hash == stored_target(path=str(tiny_path)).identity.weights_hash


def test_a_run_stays_at_the_commit_that_it_began_with(hub, tiny_path):
    run = check_ahead(compose_precompute(), [*STAGES.values()])
    [first] = hub.models[NAME]
    assert run.target.revision == first
    weights = load((tiny_path / WEIGHTS).read_bytes())
    later = hub.push(NAME, tiny_path, {WEIGHTS: save({name: tensor + 0.5 for name, tensor in weights.items()})})
    new_process(hub)
    before, after = stored_target(path=NAME, revision=run.target.revision), stored_target(path=NAME)
    assert (before.revision, after.revision) == (first, later)
    with pytest.raises(InputError, match=rf"{first}\), the run is {NAME} \(target\.revision={later}\): .* weights"):
        require_same_target(before.identity, after.identity, expected_from="the store", actual_from="the run")


def set_status(status: int) -> Callable[[FakeHub], None]:
    return lambda hub: setattr(hub, "status", status)


def without(name: str) -> Callable[[FakeHub], object]:
    return lambda hub: [files.pop(name) for files in hub.models[NAME].values()]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda hub: hub.models.clear(), rf"{NAME} is no folder here and no model at http.*; correct it.*HF_TOKEN"),
        (lambda hub: setattr(hub, "gated", True), rf"{NAME} is gated: accept its terms at http.*HF_TOKEN"),
        (set_status(403), r"was refused by the hub \(.*403 Forbidden.*HF_TOKEN"),
        (set_status(429), r"not in the cache .* \(revision main\), .* \(429 Too Many.*\); try again later"),
        (set_status(503), r"not in the cache .* \(revision main\), .*503.*; try again later"),
        (lambda hub: setattr(hub, "cut", WEIGHTS), r"cannot be fetched .*onnect.*same command again"),
        (without("config.json"), r"it has no config\.json, as a copy in GGUF: give the folder of a Hugging Face model"),
        (without(WEIGHTS), r"holds no \*\.safetensors, and other formats .*\*\.gguf"),
    ],
)  # fmt: skip
def test_what_the_hub_does_not_give_is_one_line_before_the_first_stage(hub, monkeypatch, spoil, message):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    spoil(hub)
    with pytest.raises(InputError, match=message) as caught:
        check_ahead(compose_precompute(), [*STAGES.values()])
    assert "hf_other" not in str(caught.value) and "\n" not in str(caught.value)
    assert all(bar.disable for bar in of_the_hub.WeightsBar.made)  # closed: the line does not continue one of them


def test_a_revision_that_is_not_there_is_named(hub):
    with pytest.raises(InputError, match=r"target\.revision=v2 is no branch, tag or commit of target\.path=team/tiny"):
        stored_target(path=NAME, revision="v2")


def test_a_gated_model_is_read_with_its_token(hub, monkeypatch):
    hub.gated = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    stored_target(path=NAME).require_weights()


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"no space is left in the cache .*HF_HUB_CACHE to a folder on a larger disk"),
        (errno.EROFS, r"the cache cannot be written, .*HF_HUB_CACHE to a folder that can be"),
    ],
)
def test_a_cache_that_takes_no_file_is_named(hub, monkeypatch, number, message):
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(of_the_hub, "snapshot_download", fail)
    with pytest.raises(InputError, match=message):
        stored_target(path=NAME)


def test_without_a_network_a_model_is_read_from_the_cache(hub, monkeypatch, caplog):
    stored_target(path=NAME)
    new_process(hub)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    target = stored_target(path=NAME)
    [line] = [each.getMessage() for each in caplog.records if each.name == of_the_hub.__name__]
    assert "127.0.0.1:9 cannot be reached" in line and "read from the cache" in line
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # for servers
    with pytest.raises(InputError, match=r"cannot be fetched .*; run the command once where there is a network"):
        target.require_weights()
    new_process(hub)
    with pytest.raises(InputError, match=r"target\.path=team/none is no folder, not in the cache .*127\.0\.0\.1:9 can"):
        stored_target(path="team/none")


def test_a_folder_that_is_named_like_an_id_is_the_target(hub, tiny_path, tmp_path, monkeypatch, caplog):
    shutil.copytree(tiny_path, tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert stored_target(path=NAME, revision="v2").revision is None
    assert hub.asked == []
    assert caplog.messages == [f"target.revision=v2 has no effect: target.path={NAME} is a folder here, not a hub id"]


def test_the_model_of_code_that_was_trusted_is_built(hub, tiny_path):
    config = json.loads((tiny_path / "config.json").read_text()) | {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"},
    }
    code = (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class Mine(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    hub.push("team/mine", tiny_path, {"config.json": json.dumps(config).encode(), "mine.py": code.encode()})
    with pytest.raises(InputError, match=r"Python code of its own.*target\.trust_remote_code=true"):
        stored_target(path="team/mine")
    stored_target(path="team/mine", trust_remote_code=True).require_weights()


def test_requests_and_retries_are_not_logged(hub, caplog):
    from eagle3.adapters.quiet import quiet_libraries

    quiet_libraries()
    with caplog.at_level(logging.INFO):
        stored_target(path=NAME).require_weights()
    assert caplog.messages == [f"fetching the weights of {NAME} into the cache {constants.HF_HUB_CACHE}"]
