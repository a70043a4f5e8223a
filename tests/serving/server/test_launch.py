"""action=launch as a user meets it, with a real process in SGLang's place."""

import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exported_head import Editable, edit_json
from scripts import call_script
from serving_fixtures import environment, free_port, launch_settings, sglang_site
from stores import ASSETS

from eagle3.engine.command import Draft
from eagle3.engine.endpoint import is_reachable
from eagle3.engine.process import Server
from eagle3.errors import InputError
from eagle3.serving.server.launch import announce, launch
from eagle3.target.files import read_target_files

TINY = ASSETS / "tiny"
CHAIN: dict[str, Any] = {"steps": 3, "topk": 1, "draft_tokens": None}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "a closed terminal"])
def test_launch_says_where_it_is_ready_and_ends_with_its_server(
    number,
    tmp_path,
    head_folder,
    capsys,
    caplog,
    monkeypatch,
):
    def announced(server: Server, information: Mapping[str, Any]) -> None:
        announce(server, information)
        assert is_reachable(server.url)
        signal.raise_signal(number)

    monkeypatch.setattr("eagle3.serving.server.launch.announce", announced)
    variables = ",".join(f"{name}:'{value}'" for name, value in environment(sglang_site(tmp_path), "scripted").items())
    port, out = free_port(), tmp_path / "out"
    keys = (f"target.path={TINY}", f"head={head_folder}", f"launch.port={port}", f"launch.env={{{variables}}}")
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as ended:
        call_script("serve", "action=launch", *keys, "launch.check=false", output_dir=out)
    assert ended.value.code == 130
    said = capsys.readouterr()
    ready, asked = said.out.splitlines()
    assert ready == f"http://127.0.0.1:{port} is ready; ask it with:"
    assert shlex.split(asked)[:3] == ["curl", "-s", f"http://127.0.0.1:{port}/v1/chat/completions"]
    assert said.err.splitlines()[-1] == f"error: the server is stopped; its log is {out / 'server.log'}"
    assert "overlap scheduler on" in caplog.text and "fired up" in (out / "server.log").read_text()
    assert not is_reachable(f"http://127.0.0.1:{port}")


def of_an_own_kind(head: Path) -> None:
    (head / "training.json").unlink()
    edit_json(head / "config.json", head_kind="two_layer_head.TwoLayers")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_an_own_kind, "must not be served: servers"),
        (shutil.rmtree, r"head/config\.json does not exist; make it with: python serve\.py action=export"),
        (lambda head: (head / "config.json").write_text("{}"), r"head=.* must not be served: model, .*rope, context"),
        (lambda head: (head / "model.safetensors").unlink(), r"head=.* has no \*\.safetensors file; make it"),
    ],
    ids=["own kind", "nothing", "no head", "no weights"],
)
def test_dry_run_prints_the_command_of_a_head_reads_no_weights_and_refuses_what_is_none(
    tmp_path,
    exported,
    target_files,
    capsys,
    spoil,
    message,
):
    def run(**changes: Any) -> str:
        changed = replace(settings, **changes)
        launch(changed, target_files, Draft(head=str(exported), **CHAIN), dry_run=True, folder=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().out

    settings = launch_settings(tmp_path, env={"A": "b"})
    (exported / "model.safetensors").write_bytes(b"not looked at")
    command = run()
    assert command.startswith(f"A=b {sys.executable} -m sglang.launch_server --model-path {TINY} ")
    assert f"--speculative-draft-model-path {exported}" in command
    spoil(exported)
    with pytest.raises(InputError, match=message):
        run()
    assert capsys.readouterr().out == ""
    assert run(check=False) == command


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_window_that_the_server_would_not_start_with_is_refused(target_files, head_folder, tmp_path, dry_run):
    settings = launch_settings(sglang_site(tmp_path), extra_flags={"attention-backend": "triton"})
    draft = Draft(head=str(head_folder), **CHAIN, draft_window=512)
    with pytest.raises(InputError, match=r"^draft_window=512: SGLang 0\.5\.17 does not start"):
        launch(settings, target_files, draft, dry_run=dry_run, folder=tmp_path)


def test_a_head_with_errors_is_not_launched_and_dry_run_shows_them_alone(tmp_path, exported, target_files, caplog):
    def run(*, dry_run: bool) -> str:
        caplog.clear()
        draft = Draft(head=str(exported), **CHAIN)
        with caplog.at_level("INFO"):
            launch(settings, target_files, draft, dry_run=dry_run, folder=tmp_path)
        return caplog.text

    settings = launch_settings(sglang_site(tmp_path))
    assert run(dry_run=True) == ""
    edited = Editable(exported)
    edited.config["max_position_embeddings"] = 16
    edited.save()
    for dry_run in (True, False):
        with pytest.raises(InputError, match=r"must not be served: context: see the errors"):
            run(dry_run=dry_run)
        assert "max_position_embeddings=16 makes a context of 16, which is less than the target's" in caplog.text
        assert ("ok       tensors" in caplog.text) is not dry_run


def test_a_missing_sglang_is_reported_before_the_table_of_the_head(tmp_path, head_folder, target_files, caplog):
    settings = launch_settings(tmp_path, env=None)
    with caplog.at_level("INFO"), pytest.raises(InputError, match="has no SGLang"):
        launch(settings, target_files, Draft(head=str(head_folder), **CHAIN), dry_run=False, folder=tmp_path)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("launched", "refused"), [({}, True), ({"dtype": "half"}, False), ({"extra_flags": {"dtype": "half"}}, False)]
)
def test_a_head_in_another_dtype_than_the_target_is_launched_where_sglang_is_told_one_for_both(
    launched, refused, tmp_path, exported, without_weights
):
    edit_json(without_weights / "config.json", dtype="float16")
    target = read_target_files(path=str(without_weights))
    settings, draft = launch_settings(tmp_path, **launched), Draft(head=str(exported), **CHAIN)
    if refused:
        with pytest.raises(InputError, match="must not be served: dtype"):
            launch(settings, target, draft, dry_run=True, folder=tmp_path)
    else:
        launch(settings, target, draft, dry_run=True, folder=tmp_path)
