"""The report of a bench run: results.json, report.md, the pictures, and the same in W&B."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from pydantic import TypeAdapter

from eagle3.markdown import table
from eagle3.serving.bench.loads import MeasuredLoad
from eagle3.serving.bench.plots import PICTURES, draw_pictures
from eagle3.serving.bench.stats import CONFIDENCE, Cell, Interval, SpeedUp, Spread, by_set, gather_cells, stops_paying
from eagle3.settings.serving import SIDES
from eagle3.storage.files import atomic_write, write_json

NONE = "-"


def write_bench_report(loads: Sequence[MeasuredLoad], facts: Mapping[str, Any], folder: Path) -> str:
    """Write the report's files and return its verdicts, a line for each prompt set. `facts` go in as they are."""
    found = gather_cells(loads)
    said = [line for prompt_set, of_set in by_set(found).items() for line in verdicts(prompt_set, of_set)]
    write_json(folder / "results.json", {**facts, "verdicts": said, "cells": [asdict(cell) for cell in found]})
    draw_pictures(by_set(found), folder)
    with atomic_write(folder / "report.md") as file:
        file.write(report_text(found, said, facts).encode())
    return "\n".join(said)


def read_cells(path: Path) -> dict[str, list[Cell]]:
    """Read the cells of each prompt set, by rising concurrency, from a results.json."""
    return by_set(TypeAdapter(list[Cell]).validate_python(json.loads(path.read_text())["cells"]))


def verdicts(prompt_set: str, found: Sequence[Cell]) -> list[str]:
    """Return what is to be said of each side with a head that was measured."""
    lines = []
    for side, judge in (("head", fixed_verdict), ("adaptive", adaptive_verdict)):
        ratios = {cell.concurrency: cell.speed_ups[side].tpot for cell in found if side in cell.speed_ups}
        known = {load: ratio for load, ratio in ratios.items() if ratio is not None}
        if known:
            lines.append(f"{prompt_set}: {judge(known)}")
        elif side == "head" or ratios:
            lines.append(f"{prompt_set}: plain target and {side} were not both measured")
    return lines


def adaptive_verdict(speed_ups: Mapping[int, Interval]) -> str:
    """Say between which speed-ups steps that change with the load keep it."""
    least, most = (choose(speed_ups, key=lambda load: speed_ups[load].value) for choose in (min, max))
    return (
        f"with steps that change with the load the speed-up is from {format_ratio(speed_ups[least])} at concurrency "
        f"{least} to {format_ratio(speed_ups[most])} at {most}"
    )


def fixed_verdict(speed_ups: Mapping[int, Interval]) -> str:
    """Say from which concurrency on speculation stops paying."""
    end = stops_paying(speed_ups)
    if end is None:
        return f"speculation pays at every concurrency measured, {min(speed_ups)} to {max(speed_ups)}"
    return (
        f"speculation stops paying at concurrency {end}, speed-up {format_ratio(speed_ups[end])}; action=tune "
        f"tune.concurrency={end} looks for settings that pay there, tune.loads for steps that change with the load"
    )


# --- report.md -------------------------------------------------------------------------------------------------------

DEFINITIONS = f"""\
- Time per output token (TPOT) of an answer: (latency - time to first token) / (tokens - 1). Time to first token (TTFT):
  from sending the request to receiving its first token. Percentiles are over the answers of all repeats.
- Tokens/s: output tokens of complete answers, from the first request sent to the last answer complete.
- Accept length: 1 + accepted drafts / verifications, as the server counts them.
- Same answers: the share that is the plain server's first answer to the prompt, token for token (greedy alone). In bf16
  near-ties flip with the shape of a batch: how often shows on the plain side. Far fewer on the head's side say that the
  server does not verify what it should, whatever its speed.
- Speed-up: the ratio of the two servers' median TPOT, and of their tokens/s; geometric mean over repeats with a
  {CONFIDENCE:.0%} interval (Student's t on the logarithms, one value a repeat). Speculation stops paying at the lowest
  concurrency where the interval of TPOT is not wholly above 1.
- Answers end at the end of the turn. Warm-up requests count nowhere, failed ones in no column but their own."""


def report_text(found: Sequence[Cell], said: Sequence[str], facts: Mapping[str, Any]) -> str:
    sets = by_set(found)
    parts = ["# Bench: the plain target and the head", "", *(f"- {line}" for line in said), "", DEFINITIONS]
    for prompt_set, of_set in sets.items():
        parts += ["", f"## {prompt_set}", "", load_table(of_set), "", depth_table(of_set)]
        parts += [
            f"\nFailed at concurrency {cell.concurrency}: {errors}" for cell in of_set if (errors := count_errors(cell))
        ]
    parts += ["", *(f"![{name}]({name})" for name in PICTURES), "", "## How it was measured", "", *fact_lines(facts)]
    return "\n".join(parts) + "\n"


def load_table(found: Sequence[Cell]) -> str:
    """Return a row for each concurrency and side."""
    head = ["concurrency", "side", "TPOT ms: median", "p90", "p99", "TTFT ms: median", "p90", "p99", "tokens/s"]
    head += ["accept length", "same answers", "answers", "failed", "speed-up TPOT", "speed-up tokens/s"]
    rows = []
    for cell in found:
        for side, of_side in sorted(cell.sides.items(), key=lambda item: SIDES.index(item[0])):
            gain = cell.speed_ups.get(side)
            times = [*milliseconds(of_side.tpot), *milliseconds(of_side.ttft), f"{of_side.throughput:.0f}"]
            shares = [format_number(of_side.accept_length), format_share(of_side.same_answers)]
            counts = [str(of_side.requests - of_side.failed), str(of_side.failed)]
            gains = [format_ratio(gain.tpot if gain else None), format_ratio(gain.throughput if gain else None)]
            rows.append([str(cell.concurrency), side, *times, *shares, *counts, *gains])
    return table(head, rows, rule="---:")


def depth_table(found: Sequence[Cell]) -> str:
    """Return a row for each side and concurrency: the share of verifications that accepted at least so many drafts."""
    of_sides = [(cell.concurrency, side, cell.sides[side]) for side in SIDES for cell in found if side in cell.sides]
    depths = {f"{side}, concurrency {load}": of.per_depth for load, side, of in of_sides if of.per_depth}
    deepest = max(map(len, depths.values()), default=0)
    if not deepest:
        return ""
    head = ["accepted at depth", *(str(depth) for depth in range(1, deepest + 1))]
    rows = [
        [name, *(format_number(share) for share in shares), *[NONE] * (deepest - len(shares))]
        for name, shares in depths.items()
    ]
    return table(head, rows, rule="---:")


def count_errors(cell: Cell) -> str:
    parts = [
        f"{side}: {count} times {reason}" for side, of in cell.sides.items() for reason, count in of.errors.items()
    ]
    return "; ".join(parts)


def milliseconds(spread: Spread | None) -> list[str]:
    return [f"{1000 * value:.2f}" for value in asdict(spread).values()] if spread else [NONE] * 3


def format_number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def format_share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def format_ratio(ratio: Interval | None) -> str:
    if ratio is None:
        return NONE
    return f"{ratio.value:.2f}" + ("" if ratio.low is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]")


def fact_lines(facts: Mapping[str, Any], depth: int = 0) -> list[str]:
    """Return a nested list."""
    lines = []
    for name, value in facts.items():
        nested = isinstance(value, Mapping)
        lines.append(f"{'  ' * depth}- {name}:" if nested else f"{'  ' * depth}- {name}: `{value}`")
        lines += fact_lines(value, depth + 1) if nested else []
    return lines


# --- W&B -------------------------------------------------------------------------------------------------------------


def log_to_wandb(logger: WandbLogger, loads: Sequence[MeasuredLoad], facts: Mapping[str, Any], folder: Path) -> None:
    """Log a table with a row for each cell and side, the pictures, and `facts` as the run's config."""
    logger.log_hyperparams(dict(facts))
    columns = ["prompt_set", "concurrency", "side", "tpot_ms", "ttft_ms", "tokens_per_second", "accept_length"]
    columns += ["same_answers", "failed", "speed_up_tpot", "speed_up_throughput"]
    rows = [row for cell in gather_cells(loads) for row in _wandb_rows(cell)]
    logger.log_table("bench", columns=columns, data=rows)
    for name in PICTURES:
        logger.log_image(name.removesuffix(".png"), [str(folder / name)])


def _wandb_rows(cell: Cell) -> list[list[Any]]:
    return [
        [
            cell.prompt_set,
            cell.concurrency,
            side,
            1000 * of_side.tpot.median if of_side.tpot else None,
            1000 * of_side.ttft.median if of_side.ttft else None,
            of_side.throughput,
            of_side.accept_length,
            of_side.same_answers,
            of_side.failed,
            *_gains(cell.speed_ups.get(side)),
        ]
        for side, of_side in cell.sides.items()
    ]


def _gains(speed_up: SpeedUp | None) -> list[float | None]:
    ratios = (speed_up.tpot, speed_up.throughput) if speed_up else (None, None)
    return [ratio.value if ratio else None for ratio in ratios]
