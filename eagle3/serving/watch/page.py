"""watch.html: accept length and throughput by time, one file that needs no network and runs no script."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eagle3.serving.watch.reading import Alarm, Reading

WIDTH, HEIGHT = 1000.0, 200.0  # of a curve, in SVG's units


def page(readings: Sequence[Reading], alarm: Alarm, baseline: float, head: str, command: str) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    lengths = [reading.accept_length for reading in readings]
    curves = [
        curve("Accept length", readings, lengths, {"baseline": baseline, "fallen below": alarm.threshold}),
        curve("Throughput, tokens/s", readings, [reading.throughput for reading in readings], {}),
    ]
    return environment.get_template("page.html.jinja").render(
        curves=curves, alarm=alarm, baseline=baseline, head=head, command=command, latest=readings[-1],
        begin=clock(readings[0].time), end=clock(readings[-1].time), width=WIDTH, height=HEIGHT,
    )  # fmt: skip


def clock(time: float) -> str:
    return f"{datetime.datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S %Z}"


def curve(
    name: str, readings: Sequence[Reading], values: Sequence[float | None], marks: dict[str, float]
) -> dict[str, Any]:
    """Return what the page draws: pieces of a line, broken where there is no value, and levels across it."""
    top = 1.05 * max([value for value in values if value is not None] + [*marks.values(), 1e-9])
    begin, span = readings[0].time, max(readings[-1].time - readings[0].time, 1e-9)

    def height(value: float) -> float:
        return HEIGHT * (1 - value / top)

    pieces: list[list[str]] = [[]]
    for reading, value in zip(readings, values, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{WIDTH * (reading.time - begin) / span:.1f},{height(value):.1f}")
    levels = [(label, value, height(value)) for label, value in marks.items()]
    return {"name": name, "top": top, "pieces": [piece for piece in pieces if piece], "levels": levels}
