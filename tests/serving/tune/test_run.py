"""action=tune as a user meets it: from prompts to the command, and what is there when it is stopped."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fitted_head import PROMPT
from scripts import call_script
from serving_fixtures import launch_settings, serve_run, sglang_site
from small_servers import alone
from stores import ASSETS
from timed_machine import CHAINS, SETTINGS, gain, settings

import eagle3.serving.tune.run
from eagle3.errors import InputError, Interrupted
from eagle3.serving.check.prompts import Conversations
from eagle3.serving.tune.run import tune
from eagle3.serving.tune.timing import ServerTimer
from eagle3.settings.serving import TuneSettings
from eagle3.target.files import read_target_files


def tune_with(given: TuneSettings, folder: Path, **launch: Any) -> None:
    target = read_target_files(path=str(ASSETS / "tiny"))
    first = [alone(PROMPT), alone(PROMPT[3:])]
    asked = Conversations("here", "all", first, ["here", "here"], Counter())
    launched = launch_settings(sglang_site(folder), check=False, **launch)
    run = replace(serve_run("tune", "head=head"), tune=given, launch=launched)
    tune(run, target, asked, origin={}, folder=folder / "out")


def test_the_command_without_timings_replays_every_setting_on_the_users_prompts(
    tiny_path, tmp_path, head_folder, capfd
):
    rows = ('{"turns": ["Hi", "And then?"]}', '{"prompt": "Grüße, 你好"}', '{"prompt": "left out"}')
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    given = (f"target.path={tiny_path}", f"head={head_folder}", f"prompts.path={tmp_path}/chats.jsonl")
    shapes = ("tune.steps=[1,3]", "tune.topk=[1,2]", "tune.draft_tokens=[4]")
    short = ("max_new_tokens=8", "tune.timed=0", "limit=2")
    call_script("serve", "action=tune", *given, *shapes, *short, output_dir=tmp_path / "out")
    said = capfd.readouterr()
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert {(row["steps"], row["topk"], row["draft_tokens"]) for row in report["settings"]} == {
        (1, 1, 2), (3, 1, 4), (3, 2, 4),
    }  # fmt: skip
    assert (report["conditions"]["conversations"], report["conditions"]["turns"], report["plain"]) == (2, "all", {})
    assert all(row["replayed"]["prompts"] == 3 for row in report["settings"])  # the first conversation has two turns
    assert said.out.count("~") == 3  # a predicted speed-up of each
    assert "Grüße" not in said.out + said.err + (tmp_path / "out" / "tune.json").read_text()


def test_replayed_answers_and_requests_end_where_the_answers_of_training_end(tmp_path, head_folder, monkeypatch):
    sampled: list[dict[str, Any]] = []

    def stopped(*given: Any) -> NoReturn:
        assert given[-1] == {1, 2}
        raise InputError("seen")

    monkeypatch.setattr(eagle3.serving.tune.run, "decoder_gains", stopped)
    monkeypatch.setattr(eagle3.serving.tune.run, "PlainAnswers", sampled.append)
    given = (f"target.path={ASSETS}/tiny", f"head={head_folder}", "chat.stop_tokens=['<|im_start|>']", "limit=2")
    with pytest.raises(SystemExit):
        call_script(
            "serve", "action=tune", *given, f"prompts.path={ASSETS}/prompts/heldout.jsonl", "tune.timed=0",
            output_dir=tmp_path / "out",
        )  # fmt: skip
    assert [each["stop_token_ids"] for each in sampled] == [[1, 2]]


def test_a_search_over_loads_starts_real_servers_and_writes_the_steps_of_each_load(tmp_path, capsys, monkeypatch):
    known = {setting: gain(setting) for setting in CHAINS if setting.steps == 3}
    monkeypatch.setattr(eagle3.serving.tune.run, "decoder_gains", lambda *_: known)
    tune_with(settings(loads=[1, 2], timed=1), tmp_path, fault="scripted")
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    logs = {path.name for path in (tmp_path / "out").glob("*.log")}
    assert logs == {"3-1-4.log", "plain.log"}
    assert [row["timed"]["2"]["requests"] for row in report["settings"]] == [2]
    pays = any(best["speed_up"] > 1 for best in report["best"].values())  # by the machine's speed
    assert ("schedules" in report) is pays
    assert "plain target" in capsys.readouterr().out


@pytest.mark.parametrize("stopped", ["decoder_gains", "the plain target"])
def test_stopped_midway_the_message_says_what_is_there(stopped, tmp_path, monkeypatch):
    def stop(*given: Any) -> NoReturn:
        raise KeyboardInterrupt

    known = {setting: gain(setting) for setting in SETTINGS}
    monkeypatch.setattr(eagle3.serving.tune.run, "prepare", lambda *given: None)
    monkeypatch.setattr(ServerTimer, "__call__", stop)
    monkeypatch.setattr(
        eagle3.serving.tune.run, "decoder_gains", stop if stopped == "decoder_gains" else lambda *_: known
    )
    there = stopped != "decoder_gains"
    words = r"the findings so far are in .*tune\.json" if there else "nothing was found yet"
    with pytest.raises(Interrupted, match=words):
        tune_with(settings(), tmp_path)
    assert (tmp_path / "out" / "tune.json").exists() is there


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concurrency": 16}, r"launch\.max_running_requests=8 does not hold tune\.concurrency=16"),
        ({"loads": [1, 16]}, r"launch\.max_running_requests=8 does not hold tune\.loads=16"),
        ({"loads": [1], "timed": 0}, r"tune\.loads=\[1\] tune\.timed=0: .* set tune\.timed=4"),
        ({}, r"tune\.json is of another search; name a new folder: hydra\.run\.dir=DIR"),
    ],
)
def test_a_search_that_cannot_work_is_refused_before_the_decoders_minutes(changes, words, tmp_path, monkeypatch):
    monkeypatch.setattr(eagle3.serving.tune.run, "decoder_gains", lambda *given: pytest.fail("came first"))
    if not changes:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "tune.json").touch()
    with pytest.raises(InputError, match=words):
        tune_with(settings(**changes), tmp_path, max_running_requests=8)
