"""What a search over loads found: a table, adaptive.json for SGLang, tune.json and a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eagle3.engine.adaptive import write_adaptive
from eagle3.serving.bench.plots import set_loads
from eagle3.serving.tune.loads import LoadStates, adaptive_steps, thresholds
from eagle3.serving.tune.predict import Setting
from eagle3.serving.tune.report import PICTURE, REPORT, as_json
from eagle3.serving.tune.search import SearchState
from eagle3.storage.files import write_json

ADAPTIVE = "adaptive.json"


def loads_table(states: LoadStates) -> str:
    """Return a row for each load: the plain target's time per token, each timed chain's speed-up, and the choice."""
    chains = _chains(states)
    head = ["requests", "plain [ms]", *(f"{chain.steps} steps" for chain in chains), "best"]
    rows = [
        [
            str(load),
            f"{_plain_seconds(state) * 1000:.3f}",
            *(f"{_speed_up(state, chain):.2f}" for chain in chains),
            f"{steps} steps" if (steps := adaptive_steps(states)[load]) else "plain",
        ]
        for load, state in states.items()
    ]
    return "\n".join("".join(cell.rjust(12) for cell in row) for row in (head, *rows))


def loads_advice(states: LoadStates, folder: Path, *, target: str, head: str) -> str:
    """Return the command to serve with, or that no load is served faster with the head."""
    if not any(adaptive_steps(states).values()):
        return "no chain beats the plain target at any of these loads; serve the target without a head"
    lines = [
        "steps change with the load:",
        f"  python serve.py action=launch target.path={target} head={head} adaptive={folder / ADAPTIVE}",
    ]
    if not all(adaptive_steps(states).values()):
        lines.insert(1, "(where the plain target is the fastest, the server does not draft)")
    return "\n".join(lines)


def write_loads_report(states: LoadStates, folder: Path, conditions: Mapping[str, Any]) -> None:
    """Write tune.json, which says under what `conditions` the search was made, and with timings adaptive.json and
    tune.png."""
    steps = adaptive_steps(states) if _chains(states) else {}
    of_loads = {str(load): as_json(state) for load, state in states.items()}
    write_json(folder / REPORT, {**conditions, "steps": steps, "loads": of_loads})
    if steps:
        write_adaptive(folder / ADAPTIVE, thresholds(steps))
        _picture(states, folder / PICTURE)


def _chains(states: LoadStates) -> list[Setting]:
    return sorted({chain for state in states.values() for chain in state.timed})


def _plain_seconds(state: SearchState) -> float:
    assert state.plain is not None
    return state.plain.seconds_per_token


def _speed_up(state: SearchState, chain: Setting) -> float:
    return state.speed_up(state.timed[chain].seconds_per_token)


def _picture(states: LoadStates, path: Path) -> None:
    """Draw each timed chain's speed-up over the load, and which is chosen."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    loads, steps = [*states], adaptive_steps(states)
    for chain in _chains(states):
        axes.plot(loads, [_speed_up(states[load], chain) for load in loads], "o-", label=f"chain of {chain.steps}")
    chosen = [max(1.0, *(_speed_up(state, chain) for chain in _chains(states))) for state in states.values()]
    axes.plot(loads, chosen, "ks", markersize=11, fillstyle="none", label="chosen (in numbers: steps)")
    for load, height in zip(loads, chosen, strict=True):
        axes.annotate(str(steps[load]), (load, height), textcoords="offset points", xytext=(0, 9), ha="center")
    axes.axhline(1, color="grey", label="plain target")
    set_loads(axes, loads)
    axes.set_ylabel("speed-up in time per token")
    axes.margins(y=0.12)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
