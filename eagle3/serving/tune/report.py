"""The report of a search: the table, the commands to serve with, tune.json and tune.md."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.draft_shape import Shape
from eagle3.engine.command import Draft, command_words, draft_flags
from eagle3.markdown import table
from eagle3.serving.bench.stats import Summary
from eagle3.serving.report import number, share, with_error, write_report
from eagle3.serving.tune.schedule import schedule_lines, schedules
from eagle3.serving.tune.search import Findings, thresholds

REPORT, PAGE = "tune.json", "tune.md"
SHOWN = 12  # settings in the table; tune.json has all


def write_tune_report(found: Findings, folder: Path, conditions: Mapping[str, Any], *, target: str, head: str) -> str:
    """Write the files and return the table with the advice. `conditions` says how the search was made."""
    text = "\n".join([settings_table(found), "", *failures(found), *advice(found, target=target, head=head)])
    numbers = {**conditions, **as_json(found), **by_load(found, head)}
    write_report(folder / REPORT, numbers, folder / PAGE, text)
    return text


def by_load(found: Findings, head: str) -> dict[str, Any]:
    """Return the steps of each load; nothing unless loads were timed and drafting pays at one of them."""
    steps = found.steps()
    if not found.settings.loads or not any(steps.values()):
        return {}
    told = schedules(thresholds(steps), max(steps), head)
    return {"steps": steps, "plain_from": found.plain_from(), "schedules": told}


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


def advice(found: Findings, *, target: str, head: str) -> Iterator[str]:
    if found.settings.loads:
        yield from _advice_by_load(found, target=target, head=head)
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
    draft = Draft(head=head, draft_window=found.settings.draft_window, **best._asdict())
    yield f"  {shlex.join(command_words(draft_flags(draft)))}"
    yield _launch(found, best, target, head)


def _launch(found: Findings, setting: Shape, target: str, head: str) -> str:
    return (
        f"  python serve.py action=launch target.path={target} head={head} steps={setting.steps} topk={setting.topk} "
        f"draft_tokens={setting.draft_tokens} draft_window={found.settings.draft_window or 'null'}"
    )


def _advice_by_load(found: Findings, *, target: str, head: str) -> Iterator[str]:
    """Advise one pool of servers with the head, or two: with it at the lower loads, without it at the higher ones."""
    if not found.timed:
        return
    told = by_load(found, head)
    if not told:
        yield "no chain beats the plain target at any of these loads; serve the target without a head"
        return
    yield "fastest: " + ", ".join(f"{load} at a time: {chain or 'no'} steps" for load, chain in told["steps"].items())
    limit = told["plain_from"]
    loads = [load for load in told["steps"] if limit is None or load < limit]
    chain = found.best(*loads)
    if limit is None:
        yield "one pool of servers, with the head:"
        yield _launch(found, chain, target, head)
    else:
        yield f"two pools of servers, with the head below {limit} running requests, without it from there on:"
        yield f"{_launch(found, chain, target, head)} launch.max_running_requests={limit - 1}"
        yield f"  python serve.py action=launch target.path={target}"
    mean = f"{found.mean_speed_up(chain, loads):.2f}"
    yield f"the {chain} has the highest mean speed-up (geometric) at {', '.join(map(str, loads))} at a time: {mean}"
    for load in loads:
        if (speed_up := found.speed_up(chain, load)) <= 1:
            yield f"at {load} at a time it has only {speed_up:.2f} times the plain target's speed"
    yield "the steps of each load, for servers that change them:"
    yield from (f"  {line}" for line in schedule_lines(told["schedules"]))


def as_json(found: Findings) -> dict[str, Any]:
    """Return the whole search; times in seconds, numbers of loads by concurrency."""
    loads = found.settings.all_loads
    best = {load: found.best(load) for load in loads}
    return {
        "best": {load: {**each._asdict(), "speed_up": found.speed_up(each, load)} for load, each in best.items()},
        "plain": {load: asdict(timing) for load, timing in found.plain.items()},
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
