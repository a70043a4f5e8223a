"""Bars: lines in a log, movement on a terminal, none at all; and JSON lines for machines."""

import io
import json
import logging
import os
import pty
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from stores import ASSETS, ROOT
from tqdm import tqdm

from eagle3 import progress
from eagle3.progress import JsonLines, arrange_bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def arranged() -> None:
    arrange_bars(shown=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_bar_is_a_line_a_minute(
    clock: list[float], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    with tqdm(total=1000, desc="answers", unit="prompt", mininterval=0) as bar:
        for second in range(150):
            clock[0] = float(second)
            bar.update(2)
            bar.refresh()  # as Lightning does
    lines = [record for record in caplog.records if record.name == "eagle3.progress"]
    assert [line.fields["progress"]["done"] for line in lines] == [122, 242]  # type: ignore[attr-defined]
    assert "answers" in lines[0].getMessage() and "122/1000" in lines[0].getMessage()
    assert "\r" not in lines[0].getMessage()
    assert capsys.readouterr().err == ""


def test_a_bar_of_a_few_seconds_says_nothing_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert sum(tqdm(range(10), desc="short")) == 45
    assert caplog.records == []


def test_on_a_terminal_a_bar_moves_while_nothing_ends() -> None:
    screen = Terminal()
    with tqdm(total=3, desc="slow", file=screen):
        before = screen.getvalue()
        deadline = time.monotonic() + 10
        while "00:02" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert "00:02" in screen.getvalue().removeprefix(before)


def test_bars_move_on_while_another_thread_begins_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    with tqdm(total=3, desc="slow", file=screen) as bar:
        begun = tqdm.__new__(tqdm)  # listed, and not yet a bar: where a thread stands between the two halves of tqdm()
        before = len(screen.getvalue())
        monkeypatch.setattr(bar, "last_print_t", 0.0)
        progress._draw_again()
        assert "slow" in screen.getvalue()[before:]
        begun.__init__(total=5, desc="begun", file=screen)  # type: ignore[misc]
        monkeypatch.setattr(begun, "last_print_t", 0.0)
        progress._draw_again()
        assert "begun" in screen.getvalue()
        begun.close()


@pytest.mark.parametrize("asked", [{}, {"disable": False}, {"disable": None}])
def test_one_switch_turns_all_bars_off(asked: dict[str, bool | None]) -> None:
    arrange_bars(shown=False)
    screen = Terminal()
    assert list(tqdm(range(3), file=screen, **asked)) == [0, 1, 2]  # type: ignore[arg-type]
    assert screen.getvalue() == ""


def test_a_json_line_holds_the_fields_and_the_traceback() -> None:
    record = logging.LogRecord("eagle3.x", logging.WARNING, "f.py", 1, "%d rows\nleft", (3,), None)
    record.fields = {"progress": {"done": 3}}
    line = JsonLines().format(record)
    told = json.loads(line)
    assert "\n" not in line
    assert (told["level"], told["logger"], told["message"]) == ("WARNING", "eagle3.x", "3 rows\nleft")
    assert told["progress"] == {"done": 3}
    try:
        raise KeyError("gone")
    except KeyError:
        record.exc_info = sys.exc_info()
    assert "KeyError" in json.loads(JsonLines().format(record))["exception"]


def prompts_stage(folder: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "precompute.py", "stages=[prompts]", f"prompts.path={ASSETS}/prompts/heldout.jsonl",
        "prompts/privacy=patterns", "prompts.processes=1", "prompts.limit=20", f"out_dir={folder}", *arguments,
    ]  # fmt: skip


def test_log_json_is_an_object_a_line_on_stderr_and_text_in_the_file(tmp_path: Path) -> None:
    done = subprocess.run(prompts_stage(tmp_path, "log=json"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert told and all({"time", "level", "logger", "message"} <= set(each) for each in told)
    assert told[-1]["message"] in (tmp_path / "logs" / "precompute.log").read_text()


@pytest.mark.parametrize("shown", [True, False])
def test_a_command_shows_its_bars_on_a_terminal_unless_progress_is_false(tmp_path: Path, shown: bool) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    command = prompts_stage(tmp_path, *([] if shown else ["progress=false"]))
    with subprocess.Popen(command, cwd=ROOT, stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # closed at the other end
                break
            if not piece:
                break
            said += piece
    os.close(ours)
    assert process.returncode == 0, said.decode()
    assert (b"prompts: 100%" in said) == shown, said.decode()
