"""serve.py action=launch and action=bench as a user meets them, with real processes in SGLang's place."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exported_head import tiny_target
from fitted_head import LAYERS, PROMPT, fitted_head
from serving_fixtures import bench_settings, environment, free_port, launch_settings, sglang_site
from stores import ASSETS, ROOT

from eagle3.errors import InputError
from eagle3.serving.bench.loads import Plan
from eagle3.serving.bench.run import benchmark
from eagle3.serving.head.format import save_head
from eagle3.serving.server.command import Draft
from eagle3.serving.server.launch import launch, overlap
from eagle3.storage import read_json
from eagle3.target.files import TargetFiles, read_target_files

TINY = ASSETS / "tiny"
PROMPTS = ASSETS / "prompts" / "heldout.jsonl"
CHAIN: dict[str, Any] = {"steps": 3, "topk": 1, "draft_tokens": None}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "head"
    folder.mkdir()
    save_head(folder, fitted_head(tiny_target(), PROMPT), LAYERS, "bfloat16")
    return folder


@pytest.fixture
def target() -> TargetFiles:
    return read_target_files(path=str(TINY), revision=None, trust_remote_code=False)


class Command:
    """serve.py in a process of its own, with the protocol server in SGLang's place."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        variables = ",".join(f"{name}:'{value}'" for name, value in environment(sglang_site(folder), "").items())
        self.port = free_port()
        self.out = folder / "out"
        own = [f"launch.port={self.port}", f"launch.env={{{variables}}}", f"hydra.run.dir={self.out}"]
        words = [sys.executable, "serve.py", *arguments, "launch.check=false", *own]
        self.errors = folder / "stderr"
        with self.errors.open("w") as file:
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": file, "text": True}
            self.process = subprocess.Popen(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def listens(self) -> bool:
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{self.port}/health")
        except OSError:
            return False
        return True


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    commands = []

    def start(*arguments: str) -> Command:
        commands.append(Command(tmp_path, *arguments))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.wait()
        command.process.stdout.close()


def test_launch_says_where_it_is_ready_and_stops_at_ctrl_c(started: Any, head: Path) -> None:
    command = started("action=launch", f"target.path={TINY}", f"head={head}")
    lines = [command.process.stdout.readline() for _ in range(2)]
    assert lines[0] == f"http://127.0.0.1:{command.port} is ready; ask it with:\n"
    curl = shlex.split(lines[1])
    assert curl[:3] == ["curl", "-s", f"http://127.0.0.1:{command.port}/v1/chat/completions"]
    assert command.listens()
    assert command.end(signal.SIGINT) == 130
    assert not command.listens()
    errors = command.errors.read_text()
    assert errors.splitlines()[-1] == f"error: the server is stopped; its log is {command.out / 'server.log'}"
    assert "Traceback" not in errors
    assert "fired up" in (command.out / "server.log").read_text()


def test_a_closed_terminal_ends_the_server_with_launch(started: Any) -> None:
    command = started("action=launch", f"target.path={TINY}")
    assert command.process.stdout.readline().endswith("is ready; ask it with:\n")
    assert command.end(signal.SIGHUP) == 130
    assert not command.listens()


def test_a_bench_that_is_stopped_midway_reports_what_it_measured(started: Any, head: Path) -> None:
    sets = f"bench.prompts={{chat:'{PROMPTS}',code:'{PROMPTS}'}}"
    long = ("bench.concurrency=[1,2]", "bench.repeats=1000", "limit=2", "max_new_tokens=8")
    command = started("action=bench", f"target.path={TINY}", f"head={head}", sets, *long)
    deadline = time.monotonic() + 60
    while not (command.out / "results.jsonl").exists() and command.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert command.end(signal.SIGTERM) == 130
    assert not command.listens()
    assert "chat: plain target and head were not both measured" in command.process.stdout.read()
    assert "| 1 | plain |" in (command.out / "report.md").read_text()
    assert "Traceback" not in command.errors.read_text()


def test_bench_starts_both_servers_one_after_the_other_and_compares_them(
    tmp_path: Path, head: Path, target: TargetFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 16}
    settings = bench_settings(concurrency=[2], requests_per_place=2, repeats=2)
    plan = Plan(settings, {"chat": [PROMPT, PROMPT[:9]]}, sampling)
    benchmark(
        launch_settings(sglang_site(tmp_path), check=False),
        target,
        Draft(head=str(head), **CHAIN),
        plan,
        provenance={"torch": "1"},
        folder=tmp_path,
        dry_run=False,
        logger=None,
    )
    results = read_json(tmp_path / "results.json", made_by="this test")
    [cell] = results["cells"]
    assert cell["sides"]["head"]["accept_length"] > 1.2  # the head was fitted to what the target says
    assert cell["sides"]["plain"]["requests"] == cell["sides"]["head"]["requests"] == 8
    assert {"value", "low", "high"} == set(cell["speed_up"]["tpot"])
    assert "--speculative-num-draft-tokens 4" in results["servers"]["head"]
    assert "--speculative" not in results["servers"]["plain"]
    assert results["server_info"]["head"]["version"] == "0.5.17"
    assert re.match(r"chat: speculation (pays|stops paying) at", capsys.readouterr().out)


def test_dry_run_prints_the_commands_and_starts_nothing(
    tmp_path: Path, target: TargetFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, draft = launch_settings(tmp_path, env={"A": "b"}), Draft(head="/nowhere", **CHAIN)
    launch(settings, target, draft, dry_run=True, folder=tmp_path / "out")
    line = capsys.readouterr().out
    assert line.startswith(f"A=b {sys.executable} -m sglang.launch_server --model-path {TINY} ")
    rest: dict[str, Any] = {"provenance": {}, "folder": tmp_path / "out", "logger": None}
    benchmark(settings, target, draft, Plan(bench_settings(), {}, {}), dry_run=True, **rest)
    plain, drafting = capsys.readouterr().out.splitlines()
    assert "--speculative" not in plain and drafting == line.strip()
    assert not (tmp_path / "out").exists()


def test_a_head_that_the_doctor_refuses_is_not_launched(tmp_path: Path, head: Path, target: TargetFiles) -> None:
    settings = launch_settings(sglang_site(tmp_path))
    # RoPE of the fitted head is not the target's.
    with pytest.raises(InputError, match=r"head=.* must not be served"):
        launch(settings, target, Draft(head=str(head), **CHAIN), dry_run=False, folder=tmp_path)


def test_that_sglang_is_missing_is_said_before_the_table_of_the_head(
    tmp_path: Path, head: Path, target: TargetFiles, caplog: pytest.LogCaptureFixture
) -> None:
    settings = launch_settings(tmp_path, env=None)
    with caplog.at_level("INFO"), pytest.raises(InputError, match="has no SGLang"):
        launch(settings, target, Draft(head=str(head), **CHAIN), dry_run=False, folder=tmp_path)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("wanted", "off", "words"),
    [
        (True, False, "overlap scheduler on"),
        (True, True, "off, by SGLang itself"),
        (False, True, "off, by launch.overlap_schedule=false"),
    ],
)
def test_what_became_of_the_overlap_scheduler_is_said(tmp_path: Path, wanted: bool, off: bool, words: str) -> None:
    settings = launch_settings(tmp_path, overlap_schedule=wanted)
    assert words in overlap(settings, {"disable_overlap_schedule": off})
