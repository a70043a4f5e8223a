"""Bars: lines in a log, movement on a terminal, none at all; and JSON lines for machines."""

import gc
import io
import json
import logging
import os
import pty
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path
from weakref import ref

import pytest
from scripts import Script, finished
from stores import ASSETS, ROOT

from eagle3 import progress
from eagle3.progress import Bar, JsonLines, close_bars, show_bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "REDRAW_S", 600.0)
    return now


def test_without_a_terminal_a_bar_is_a_line_a_minute(clock, caplog, capsys):
    caplog.set_level(logging.INFO)
    show_bars(True)
    with Bar(total=1000, desc="answers", unit="prompt", mininterval=0) as bar:
        for second in range(150):
            clock[0] = float(second)
            bar.update(2)
            bar.refresh()  # as Lightning does
    lines = [record for record in caplog.records if record.name == "eagle3.progress"]
    assert [line.fields["progress"]["done"] for line in lines] == [122, 242]  # type: ignore[attr-defined]
    assert "answers" in lines[0].getMessage() and "122/1000" in lines[0].getMessage()
    assert "\r" not in lines[0].getMessage()
    assert capsys.readouterr().err == ""


def test_without_a_terminal_a_bar_that_stands_still_has_its_lines_too(monkeypatch):
    monkeypatch.setattr(progress, "REDRAW_S", 0.01)
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    show_bars(True)
    written = threading.Semaphore(0)
    monkeypatch.setattr(progress.log, "info", lambda *line, **fields: written.release())
    with Bar(total=1000):
        assert all(written.acquire(timeout=60) for _ in range(3))
    monkeypatch.setattr(progress, "REDRAW_S", 600.0)
    left_open = ref(Bar(total=1000))
    gc.collect()
    assert left_open() is None


def test_on_a_terminal_an_open_bar_is_closed_before_an_error_is_printed():
    screen = Terminal()
    show_bars(True)
    bar = Bar(total=3, desc="slow", file=screen)
    close_bars()
    assert bar.disable and screen.getvalue().endswith("\n")


@pytest.mark.parametrize("asked", [{}, {"disable": False}, {"disable": None}])
def test_one_switch_turns_all_bars_off(asked):
    show_bars(False)
    screen = Terminal()
    assert list(Bar(range(3), file=screen, **asked)) == [0, 1, 2]  # type: ignore[arg-type]
    assert screen.getvalue() == ""
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"


def test_every_bar_of_the_package_is_in_the_chosen_style():
    sources = {path: path.read_text() for path in (ROOT / "eagle3").rglob("*.py")}
    assert [path.name for path, text in sources.items() if "from tqdm" in text] == ["progress.py"]


def test_a_json_line_holds_the_fields_and_the_traceback():
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


def prompts_stage(folder: Path) -> list[str]:
    return [
        "precompute", "stages=[prompts]", f"prompts.path={ASSETS}/prompts/heldout.jsonl", "prompts/privacy=patterns",
        "prompts.processes=1", "prompts.limit=20", f"out_dir={folder}",
    ]  # fmt: skip


def test_log_json_is_an_object_a_line_on_stderr_and_text_in_the_file(tmp_path):
    told = [json.loads(line) for line in finished(*prompts_stage(tmp_path), "log=json").stderr.splitlines()]
    assert told and all({"time", "level", "logger", "message"} <= set(each) for each in told)
    assert told[-1]["message"] in (tmp_path / "logs" / "precompute.log").read_text()


def test_a_command_shows_its_bars_on_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    with Script(*prompts_stage(tmp_path), stderr=theirs) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # closed at the other end
            while piece := os.read(ours, 4096):
                said += piece
    os.close(ours)
    assert process.returncode == 0, said.decode()
    assert b"prompts: 100%" in said, said.decode()
