"""Progress bars for people at a terminal, a log line a minute for logs, and JSON lines for machines."""

import io
import json
import logging
import os
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any, ClassVar
from weakref import WeakSet, ref

from tqdm import tqdm

log = logging.getLogger(__name__)
REDRAW_S = 1.0  # between two redraws on a terminal
LINE_S = 60.0  # between two lines in a log
LIBRARIES = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")  # read when they are imported


def duration(seconds: float) -> str:
    """Return a duration with its unit."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


class Bar(tqdm):
    """A tqdm bar, in the style that `show_bars` chose for this process."""

    shown: bool | None = None  # None: as tqdm draws it, e.g. in a notebook
    made: ClassVar["WeakSet[Bar]"] = WeakSet()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.closed, in_log = threading.Event(), False
        if self.shown is False:
            options["disable"] = True
        elif self.shown and (options.get("file") or sys.stderr).isatty():
            options.setdefault("mininterval", REDRAW_S)
        elif self.shown:
            in_log = True
            options |= {"file": Lines(self), "dynamic_ncols": False, "ncols": 0}
        super().__init__(*arguments, **options)
        self.made.add(self)
        if in_log and not self.disable:
            threading.Thread(target=refresh_until, args=(self.closed, ref(self)), daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        super().close()


def refresh_until(closed: threading.Event, bar: "ref[Bar]") -> None:
    """Let a log show also that nothing has ended for a while: tqdm draws only what changes."""
    while not closed.wait(REDRAW_S) and (shown := bar()) is not None:
        shown.refresh()
        del shown


class Lines(io.TextIOBase):
    """Output of a bar without a terminal: one log line per minute, the first after a minute."""

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


def show_bars(shown: bool | None) -> None:
    """Choose the style of all later bars: redrawn each second on a terminal and log lines elsewhere, or none at all."""
    Bar.shown = shown
    if shown is False or not sys.stderr.isatty():  # libraries' bars would be hundreds of lines in a log
        for variable in LIBRARIES:
            os.environ.setdefault(variable, "1")


def close_bars() -> None:
    """Close the bars that are still open after an error, so that the next line does not continue one of them."""
    for bar in list(Bar.made):
        bar.close()


class JsonLines(logging.Formatter):
    """A log record as one JSON object: time, level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
