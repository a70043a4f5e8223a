"""Bars for people who watch; for logs a line a minute; JSON lines for machines.

All bars of the process are tqdm's, those of libraries too: `arrange_bars` decides once how each of them looks.
"""

import functools
import io
import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)
MOVES_S = 1.0  # between two looks of a bar on a terminal
LINE_S = 60.0  # between two lines of a bar in a log
_original_init = tqdm.__init__


class Lines(io.TextIOBase):
    """What a bar without a terminal writes to: a line of the log each minute, and none before its first is over."""

    def __init__(self, bar: tqdm) -> None:
        self.bar, self.last = bar, time.monotonic()

    def write(self, text: str) -> int:
        line, now = text.strip(), time.monotonic()
        if line and now - self.last >= LINE_S:
            self.last = now
            log.info("%s", line, extra={"fields": {"progress": self._state()}})
        return len(text)

    def _state(self) -> dict[str, Any]:
        state = self.bar.format_dict
        rate = state["rate"] or (state["n"] - state["initial"]) / max(state["elapsed"], 1e-9)
        return {
            "what": state["prefix"].strip(": "),
            "done": state["n"],
            "total": state["total"],
            "unit": state["unit"],
            "per_second": round(rate, 3),
            "elapsed_s": round(state["elapsed"], 1),
        }


def arrange_bars(*, shown: bool) -> None:
    """Let every bar from now on move each second on a terminal, write lines elsewhere, or not be there."""

    @functools.wraps(_original_init)
    def init(bar: tqdm, *arguments: Any, **options: Any) -> None:
        if not shown:
            options["disable"] = True
        elif (options.get("file") or sys.stderr).isatty():
            options.setdefault("mininterval", MOVES_S)
        else:
            options |= {"file": Lines(bar), "dynamic_ncols": False, "ncols": 0}
        _original_init(bar, *arguments, **options)

    tqdm.__init__ = init  # type: ignore[method-assign]
    if shown:
        _mover()


@functools.cache
def _mover() -> threading.Thread:
    """Draw bars again while nothing ends: the time goes on."""
    thread = threading.Thread(target=_move, name="bars", daemon=True)
    thread.start()
    return thread


def _move() -> None:
    while True:
        time.sleep(MOVES_S)
        _draw_again()


def _draw_again() -> None:
    with tqdm.get_lock():
        for bar in list(getattr(tqdm, "_instances", ())):
            # tqdm lists a bar before it has any attribute, and gives it start_t last.
            started = hasattr(bar, "start_t") and not bar.disable
            if started and time.time() - bar.last_print_t >= MOVES_S:
                bar.refresh(nolock=True)


class JsonLines(logging.Formatter):
    """A log record as one JSON object: time, level, logger, message, and the fields that it brings."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)
