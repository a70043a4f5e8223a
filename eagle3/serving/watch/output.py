"""The three files of a watch: watch.jsonl, every reading; watch.prom, the latest for Prometheus; watch.html, a page."""

import json
import logging
import os
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from eagle3.serving.watch.page import page
from eagle3.serving.watch.reading import Alarm, Reading
from eagle3.storage.files import atomic_write, json_line, with_filename

log = logging.getLogger(__name__)

SHOWN = 2000  # readings on the page, the latest


class Output:
    """Writes into `folder`, and goes on with what an earlier watch left there."""

    def __init__(self, folder: Path, head: str | None, baseline: float, alarm: Alarm) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lines, self.prometheus, self.page = (folder / f"watch.{kind}" for kind in ("jsonl", "prom", "html"))
        self.head, self.baseline, self.alarm = head or "HEAD", baseline, alarm
        self.readings: deque[Reading] = deque(earlier(self.lines), maxlen=SHOWN)

    @property
    def command(self) -> str:
        return f"python train.py data.path=DIR/features init_from={self.head}"

    def add(self, reading: Reading) -> None:
        self.readings.append(reading)
        with with_filename(self.lines), self.lines.open("ab") as file:
            file.write(json_line(asdict(reading)))
            file.flush()
            os.fsync(file.fileno())
        with with_filename(self.prometheus):
            write_to_textfile(str(self.prometheus), self._registry(reading))  # under another name first, then renamed
        with atomic_write(self.page) as file:
            file.write(page([*self.readings], self.alarm, self.baseline, self.head, self.command).encode())

    def _registry(self, reading: Reading) -> CollectorRegistry:
        registry = CollectorRegistry()
        gauges = {
            "accept_length": ("Tokens a verification, latest reading", reading.accept_length),
            "accept_length_window": ("Mean accept length of the window, once it is full", self.alarm.mean),
            "accept_length_baseline": ("Accept length that it is compared with", self.baseline),
            "acceptance_fallen": ("1 once the head wants adapting", float(self.alarm.fallen)),
            "throughput_tokens_per_second": ("Tokens generated a second", reading.throughput),
            "running_requests": ("Requests that are being answered", reading.running),
            "server_up": ("1 if the server could be read", float(reading.error is None)),
            "reading_timestamp_seconds": ("When the latest reading was taken, since 1970", reading.time),
        }
        for name, (told, value) in gauges.items():
            if value is not None:
                Gauge(f"eagle3_{name}", told, registry=registry).set(value)
        return registry


def earlier(path: Path) -> list[Reading]:
    """Read the lines of an earlier watch; one that a kill cut short is ended, left out and counted in the log."""
    if not path.exists():
        return []
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    lines, readings = content.splitlines()[-SHOWN:], []
    for line in lines:
        with suppress(ValueError, TypeError):
            readings.append(Reading(**json.loads(line)))
    if len(readings) < len(lines):
        log.warning("%s: %d lines cannot be read and are left out", path, len(lines) - len(readings))
    return readings
