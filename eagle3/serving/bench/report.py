"""The report of a bench run: results.json and report.md."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from eagle3.decoding.paired import CONFIDENCE
from eagle3.markdown import table
from eagle3.serving.bench.loads import MeasuredLoad
from eagle3.serving.bench.stats import Cell, Interval, by_set, gather_cells, stops_paying
from eagle3.serving.report import NONE, number, share, write_report
from eagle3.settings.serving import SIDES


def write_bench_report(loads: Sequence[MeasuredLoad], facts: Mapping[str, Any], folder: Path) -> str:
    """Write the report's files, which include `facts`, and return its verdicts, a line for each prompt set."""
    cells = gather_cells(loads)
    sets = by_set(cells)
    lines = [f"{prompt_set}: {verdict(of_set)}" for prompt_set, of_set in sets.items()]
    numbers = {**facts, "verdicts": lines, "cells": [asdict(cell) for cell in cells]}
    write_report(folder / "results.json", numbers, folder / "report.md", report_text(sets, lines, facts))
    return "\n".join(lines)


def verdict(cells: Sequence[Cell]) -> str:
    """Say from which concurrency on speculation stops paying."""
    ratios = {cell.concurrency: cell.speed_ups["head"].tpot for cell in cells if "head" in cell.speed_ups}
    speed_ups = {load: ratio for load, ratio in ratios.items() if ratio is not None}
    if not speed_ups:
        return "plain target and head were not both measured"
    end = stops_paying(speed_ups)
    if end is None:
        return f"speculation pays at every concurrency measured, {min(speed_ups)} to {max(speed_ups)}"
    return (
        f"speculation stops paying at concurrency {end}, speed-up {ratio(speed_ups[end])}; action=tune "
        f"tune.concurrency={end} looks for settings that pay there, tune.loads for the load from which none does"
    )


# --- report.md -------------------------------------------------------------------------------------------------------

DEFINITIONS = f"""\
- Time per output token (TPOT) of an answer: (latency - time to first token) / (tokens - 1). Time to first token (TTFT):
  from sending the request to receiving its first token. Percentiles are over the answers of all repeats.
- Tokens/s: output tokens of complete answers, from the first request sent until fewer requests run than the load has.
  An answer that is not complete by then counts in part, by the share of its stream's parts that had come.
- Accept length: 1 + accepted drafts / verifications, as the server counts them.
- Same answers: the share that is the plain server's first answer to the prompt, token for token (greedy alone). In bf16
  near-ties flip with the shape of a batch: how often shows on the plain side. Far fewer on the head's side mean that
  the server does not verify as it should, whatever its speed.
- Speed-up: the ratio of the two servers' median TPOT, and of their tokens/s; geometric mean over repeats with a
  {CONFIDENCE:.0%} interval (Student's t on the logarithms, one value a repeat; with bench.starts, one a start, of all
  its repeats). Speculation stops paying at the lowest
  concurrency where the interval of TPOT is not wholly above 1.
- A conversation's next turn is sent when the answer before it is complete, with that answer where the row has none, as
  in a chat: the server's prefix cache then has its history. At a concurrency so many conversations are had at once.
- Answers end at the end of the turn. Warm-up requests count nowhere, failed ones in no column but their own."""


def report_text(sets: Mapping[str, Sequence[Cell]], verdicts: Sequence[str], facts: Mapping[str, Any]) -> str:
    parts = ["# Bench: the plain target and the head", "", *(f"- {line}" for line in verdicts), "", DEFINITIONS]
    for prompt_set, cells in sets.items():
        parts += ["", f"## {prompt_set}", "", load_table(cells), "", depth_table(cells)]
        for title, name in (("Failed", "errors"), ("Ended before their last turn", "ended")):
            found = ((cell.concurrency, reasons(cell, name)) for cell in cells)
            parts += [f"\n{title} at concurrency {concurrency}: {text}" for concurrency, text in found if text]
    written = yaml.safe_dump(dict(facts), sort_keys=False, allow_unicode=True, width=math.inf)  # commands in one line
    parts += ["", "## How it was measured", "", f"```yaml\n{written}```"]
    return "\n".join(parts)


def milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{1000 * seconds:.2f}"


def ratio(interval: Interval | None) -> str:
    if interval is None:
        return NONE
    limits = "" if interval.low is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    return f"{interval.value:.2f}{limits}"


# The columns of load_table, and how each is written.
COLUMNS: dict[str, Callable[[Any], str]] = {
    "concurrency": str,
    "side": str,
    "TPOT ms: median": milliseconds,
    "TPOT ms: p90": milliseconds,
    "TPOT ms: p99": milliseconds,
    "TTFT ms: median": milliseconds,
    "TTFT ms: p90": milliseconds,
    "TTFT ms: p99": milliseconds,
    "tokens/s": "{:.0f}".format,
    "accept length": number,
    "same answers": share,
    "answers": str,
    "failed": str,
    "speed-up TPOT": ratio,
    "speed-up tokens/s": ratio,
}


def load_rows(cell: Cell) -> Iterator[list[Any]]:
    """Yield the values of COLUMNS for each side; times are in seconds."""
    for side in (side for side in SIDES if side in cell.sides):
        of_side, gain = cell.sides[side], cell.speed_ups.get(side)
        spreads = [asdict(spread) if spread else {} for spread in (of_side.tpot, of_side.ttft)]
        times = [spread.get(name) for spread in spreads for name in ("median", "p90", "p99")]
        counts = [of_side.requests - of_side.failed, of_side.failed]
        gains = [gain.tpot, gain.throughput] if gain else [None, None]
        shares = [of_side.accept_length, of_side.same_answers]
        yield [cell.concurrency, side, *times, of_side.throughput, *shares, *counts, *gains]


def load_table(cells: Sequence[Cell]) -> str:
    rows = [
        [write(value) for write, value in zip(COLUMNS.values(), row, strict=True)]
        for cell in cells
        for row in load_rows(cell)
    ]
    return table([*COLUMNS], rows, rule="---:")


def depth_table(cells: Sequence[Cell]) -> str:
    """Return a row for each side and concurrency: the share of verifications that accepted at least so many drafts."""
    shares = {
        f"{side}, concurrency {cell.concurrency}": cell.sides[side].per_depth
        for side in SIDES
        for cell in cells
        if side in cell.sides and cell.sides[side].per_depth
    }
    deepest = max(map(len, shares.values()), default=0)
    if not deepest:
        return ""
    rows = [[name, *map(number, row), *[NONE] * (deepest - len(row))] for name, row in shares.items()]
    return table(["accepted at depth", *map(str, range(1, deepest + 1))], rows, rule="---:")


def reasons(cell: Cell, name: str) -> str:
    counts = {side: getattr(of_side, name) for side, of_side in cell.sides.items()}
    return "; ".join(f"{side}: {n} times {reason}" for side, found in counts.items() for reason, n in found.items())
