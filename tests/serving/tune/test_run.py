"""action=tune as a user meets it: from prompts to the flags, and what is there when it is stopped."""

import json
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest
from exported_head import tiny_target
from fitted_head import LAYERS, PROMPT, fitted_head
from scripts import run_script
from serving_fixtures import launch_settings
from stores import ASSETS
from timed_machine import SETTINGS, gain, settings

import eagle3.serving.tune.run
from eagle3.errors import InputError, Interrupted
from eagle3.head_files.format import save_head
from eagle3.serving.check.settings import Answering
from eagle3.serving.tune.run import tune
from eagle3.serving.tune.timing import ServerTimer
from eagle3.target.files import TargetFiles, read_target_files


def serve(*overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_script("serve", "action=tune", "hydra.run.dir=out", *overrides, cwd=cwd)


def test_the_command_without_timings_replays_every_setting_on_the_users_prompts(
    tiny_path: Path, tmp_path: Path
) -> None:
    target = tiny_target()
    save_head(tmp_path / "head", fitted_head(target, PROMPT), LAYERS, "float32")
    (tmp_path / "chats.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Grüße, 你好"}\n{"prompt": "left out"}\n')
    done = serve(
        f"target.path={tiny_path}", "head=head", "prompts.path=chats.jsonl", "max_new_tokens=8", "tune.timed=0",
        "limit=2", "tune.steps=[1,3]", "tune.topk=[1,2]", "tune.draft_tokens=[4]",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert {(row["steps"], row["topk"], row["draft_tokens"]) for row in report["settings"]} == {
        (1, 1, 2), (3, 1, 4), (3, 2, 4),
    }  # fmt: skip
    assert (report["conditions"]["prompts"], report["plain"]) == (2, None)
    assert len([line for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]) >= 3
    assert "Grüße" not in done.stdout + done.stderr + (tmp_path / "out" / "tune.json").read_text()


@pytest.mark.parametrize("stopped", ["decoder_gains", "the plain target"])
def test_stopped_midway_the_message_says_what_is_there(
    stopped: str, target_files: TargetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: Any) -> NoReturn:
        raise KeyboardInterrupt

    known = {setting: gain(setting) for setting in SETTINGS}
    monkeypatch.setattr(eagle3.serving.tune.run, "prepare", lambda *given: None)
    monkeypatch.setattr(ServerTimer, "__call__", stop)
    monkeypatch.setattr(
        eagle3.serving.tune.run, "decoder_gains", stop if stopped == "decoder_gains" else lambda *_: known
    )
    there = stopped != "decoder_gains"
    words = r"what was found before is in .*tune\.json" if there else "nothing was found yet"
    with pytest.raises(Interrupted, match=words):
        tune_with(target_files, tmp_path)
    assert (tmp_path / "out" / "tune.json").exists() is there


def test_servers_without_room_are_refused_before_the_decoders_minutes(
    target_files: TargetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle3.serving.tune.run, "decoder_gains", lambda *given: pytest.fail("came first"))
    with pytest.raises(InputError, match=r"launch\.max_running_requests=1 does not hold tune\.concurrency=4"):
        tune_with(target_files, tmp_path, max_running_requests=1)


@pytest.fixture
def target_files() -> TargetFiles:
    return read_target_files(path=str(ASSETS / "tiny"), revision=None, trust_remote_code=False)


def tune_with(target_files: TargetFiles, folder: Path, **launch: Any) -> None:
    answering = Answering(max_new_tokens=8, temperature=0.0, seed=0)
    tune(
        settings(), launch_settings(folder, check=False, **launch), target_files, "head", [PROMPT], answering,
        target_settings={"path": target_files.path}, origin={}, folder=folder / "out",
    )  # fmt: skip
