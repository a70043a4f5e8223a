"""The report of a search: the table, the command to serve with, tune.json, tune.md and adaptive.json."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.draft_shape import Shape
from eagle3.engine.command import draft_flags, words_of
from eagle3.engine.draft import SKIP_EXTEND, Draft, write_adaptive
from eagle3.markdown import table
from eagle3.serving.bench.stats import Summary
from eagle3.serving.report import number, share, with_error, write_report
from eagle3.serving.tune.schedule import schedule_lines, schedules
from eagle3.serving.tune.search import Findings, thresholds

REPORT, PAGE, ADAPTIVE = "tune.json", "tune.md", "adaptive.json"
SHOWN = 12  # settings in the table; tune.json has all


def write_tune_report(found: Findings, folder: Path, conditions: Mapping[str, Any], *, target: str, head: str) -> str:
    """Write the files and return the table with the advice. `conditions` says how the search was made."""
    text = "\n".join([settings_table(found), "", *failures(found), *advice(found, folder, target=target, head=head)])
    told = {"schedules": schedules_of(found, head)} if changes_with_load(found) else {}
    write_report(folder / REPORT, {**conditions, **as_json(found), **told}, folder / PAGE, text)
    if told:
        write_adaptive(folder / ADAPTIVE, thresholds(found.steps()))
    return text


def changes_with_load(found: Findings) -> bool:
    """Say whether each load has its steps, and drafting pays at one of them."""
    return bool(found.settings.loads and found.timed) and len(found.lost()) < len(found.plain)


def schedules_of(found: Findings, head: str) -> dict[str, dict[str, Any] | None]:
    return schedules(thresholds(found.steps()), max(found.plain), head)


def settings_table(found: Findings) -> str:
    """Return the plain target, the timed settings and the best predicted, fastest first; predictions are marked ~."""
    loads = found.settings.all_loads
    tried = [*found.timed, *found.failed]
    others = [setting for setting in found.ranked() if setting not in tried][: max(SHOWN - len(tried), 0)]
    shown = sorted([*found.timed, *others], key=lambda setting: -found.speed_up(setting, loads[0]))
    columns = ["steps", "topk", "draft tokens", "accept length replayed", "served"]
    columns += [*(f"speed-up x{load}" for load in loads), "same answers"]
    rows = [_row(found, setting) for setting in [*shown, *found.failed]]
    if found.plain:
        times = [f"{1000 * timing.seconds_per_token:.2f} ms" for timing in found.plain.values()]
        rows.insert(0, ["plain target", "", "", "", "", *times, _same_answers(found.plain.values())])
    return table(columns, rows, rule="---:")


def _row(found: Findings, setting: Shape) -> list[str]:
    gain, timed = found.gains[setting], [*found.timed.get(setting, {}).values()]
    return [
        *map(str, setting),
        with_error(gain.accept_length, gain.standard_error),
        number(timed[0].accept_length) if timed else "",
        *(_speed_up(found, setting, load) for load in found.settings.all_loads),
        _same_answers(timed) if timed else "",
    ]


def _same_answers(timings: Iterable[Summary]) -> str:
    """Write the lowest share of same answers at any load."""
    return share(min((each.same_answers for each in timings if each.same_answers is not None), default=None))


def _speed_up(found: Findings, setting: Shape, load: int) -> str:
    if setting in found.failed:
        return "did not run"
    return ("" if setting in found.timed else "~") + f"{found.speed_up(setting, load):.2f}"


def failures(found: Findings) -> Iterator[str]:
    """Say which loads lost requests: their times are those of the answered requests alone."""
    servers = {"the plain target": found.plain, **{str(setting): timed for setting, timed in found.timed.items()}}
    for name, timings in servers.items():
        for load, timing in timings.items():
            if timing.failed:
                yield f"{timing.failed} of {timing.requests} requests to {name} at concurrency {load} failed"


def advice(found: Findings, folder: Path, *, target: str, head: str) -> Iterator[str]:
    if found.settings.loads:
        yield from _advice_by_load(found, folder, target=target, head=head)
        return
    load = found.settings.concurrency
    best = found.best(load)
    speed_up, how = found.speed_up(best, load), "measured" if found.timed else "predicted from tune.assumed, not timed"
    if speed_up <= 1:
        yield (
            f"no setting beats the plain target at concurrency {load}: the best, {best}, has {speed_up:.2f} "
            f"times its speed ({how}); serve the target without a head"
        )
        return
    yield f"{speed_up:.2f} times the speed of the plain target at concurrency {load} ({how}) with"
    draft = Draft(head=head, window=found.settings.draft_window, **best._asdict())
    yield f"  {shlex.join(words_of(draft_flags(draft)))}"
    yield (
        f"  python serve.py action=launch target.path={target} head={head} steps={best.steps} topk={best.topk} "
        f"draft_tokens={best.draft_tokens} draft_window={found.settings.draft_window or 'null'}"
    )


def _advice_by_load(found: Findings, folder: Path, *, target: str, head: str) -> Iterator[str]:
    if not found.timed:
        return
    steps = found.steps()
    if not changes_with_load(found):
        yield "no chain beats the plain target at any of these loads; serve the target without a head"
        return
    yield "fastest: " + ", ".join(f"{load} at a time: {chain or 'no'} steps" for load, chain in steps.items())
    skip = ", ".join(f"{name}: {value}" for name, value in SKIP_EXTEND.items())
    yield (
        f"  python serve.py action=launch target.path={target} head={head} adaptive={folder / ADAPTIVE} "
        f"draft_window={found.settings.draft_window or 'null'}"
        + (f" 'launch.env={{{skip}}}'" if 0 in steps.values() else "")
    )
    yield from (f"  {line}" for line in schedule_lines(schedules_of(found, head), str(folder / ADAPTIVE)))
    for load in found.lost():
        speed_up = found.plain[load].seconds_per_token / found.served(load)[1].seconds_per_token
        if speed_up < 1:
            yield f"{load} at a time: {speed_up:.2f} times the plain target's speed; serve this load without a head"


def as_json(found: Findings) -> dict[str, Any]:
    """Return the whole search; times in seconds, numbers of loads by concurrency."""
    loads = found.settings.all_loads
    best = {load: found.best(load) for load in loads}
    return {
        "best": {load: {**each._asdict(), "speed_up": found.speed_up(each, load)} for load, each in best.items()},
        "plain": {load: asdict(timing) for load, timing in found.plain.items()},
        "no_steps": {load: asdict(timing) for load, timing in found.no_steps.items()},
        "settings": [
            {
                **setting._asdict(),
                "replayed": asdict(found.gains[setting]),
                "predicted_speed_up": {load: found.predicted(setting, load) for load in loads},
                "timed": {load: asdict(timing) for load, timing in found.timed.get(setting, {}).items()},
                "failed": found.failed.get(setting),
            }
            for setting in found.ranked()
        ],
    }
