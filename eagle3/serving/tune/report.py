"""What a search for the draft setting found: a table, the flags to use, tune.json and a picture."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eagle3.serving.tune.predict import Gain, Setting
from eagle3.serving.tune.search import SearchState
from eagle3.serving.tune.timing import LoadTiming
from eagle3.storage.files import write_json

REPORT, PICTURE = "tune.json", "tune.png"
WIDTHS = (12, 4, 6, 13, 9, 10, 9, 9, 9, 12)
HEADER = (
    "steps",
    "topk",
    "tokens",
    "predicted",
    "measured",
    "predicted",
    "measured",
    "tokens/s",
    "speed-up",
    "same answers",
)


def settings_table(found: SearchState, *, rows: int) -> str:
    """Return the plain target, all settings that were tried, and the best predicted up to `rows`, fastest first."""
    tried = [*found.timed, *found.failed]
    others = [setting for setting in found.predicted() if setting not in tried]
    shown = sorted([*tried, *others[: max(rows - len(tried), 0)]], key=lambda one: _seconds(found, one))
    lines = [HEADER, *([_plain_row(found.plain)] if found.plain else []), *(_row(found, setting) for setting in shown)]
    unit = "ms" if found.plain else "1: plain"
    return "\n".join([f"{'accept length':>47} {f'time per token [{unit}]':>{20}}", *(_aligned(line) for line in lines)])


def _plain_row(plain: LoadTiming) -> list[str]:
    return [
        "plain target",
        *[""] * 5,
        f"{plain.seconds_per_token * 1000:.3f}",
        f"{plain.tokens_per_second:.0f}",
        "1.00",
        _share(plain.same_answers),
    ]


def _row(found: SearchState, setting: Setting) -> list[str]:
    scale, timed = 1000 if found.plain else 1, found.timed.get(setting)
    foreseen = found.expected.get(setting, found.predicted()[setting]) * scale
    return [
        *map(str, setting),
        _with_error(found.gains[setting]),
        f"{timed.gain.accept_length:.3f}" if timed and timed.gain else "",
        f"{foreseen:.3f}",
        f"{timed.seconds_per_token * scale:.3f}" if timed else "",
        f"{timed.tokens_per_second:.0f}" if timed else "",
        "did not run" if setting in found.failed else f"{found.speed_up(_seconds(found, setting)):.2f}",
        _share(timed.same_answers) if timed else "",
    ]


def _with_error(gain: Gain) -> str:
    return f"{gain.accept_length:.3f}" + ("" if gain.standard_error is None else f" ± {gain.standard_error:.3f}")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _aligned(cells: Iterable[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _seconds(found: SearchState, setting: Setting) -> float:
    """Return the time per token, measured where it was."""
    return found.timed[setting].seconds_per_token if setting in found.timed else found.predicted()[setting]


def advice(found: SearchState, *, target: str, head: str, concurrency: int) -> str:
    """Return the flags to use, or that there are none."""
    setting, seconds = found.best()
    speed_up = found.speed_up(seconds)
    said = "measured" if found.timed else "predicted from tune.assumed, not timed"
    if speed_up > 1:
        lines = [
            f"{speed_up:.2f} times the speed of the plain target at concurrency {concurrency} ({said}) with",
            f"  --speculative-algorithm EAGLE3 --speculative-draft-model-path {head} {setting.flags}",
            f"  python serve.py action=launch target.path={target} head={head} steps={setting.steps} "
            f"topk={setting.topk} draft_tokens={setting.draft_tokens}",
        ]
    else:
        lines = [
            f"no setting beats the plain target at concurrency {concurrency}: the best, {setting.flags}, has "
            f"{speed_up:.2f} times its speed ({said}); serve the target without a head"
        ]
    return "\n".join([*lines, *_not_timed(found, max(speed_up, 1.0))])


def _not_timed(found: SearchState, speed_up: float) -> Iterator[str]:
    """Name a better setting than that, if one is predicted and timings would tell."""
    if not found.timed:
        return
    for setting, seconds in found.predicted().items():
        if setting not in found.timed and setting not in found.failed and found.speed_up(seconds) > speed_up:
            yield f"{setting.flags} was not timed; {found.speed_up(seconds):.2f} is predicted: raise tune.timed"
            return


def failures(found: SearchState) -> str:
    """Say which loads lost requests: their times are those of the others alone."""
    loads = {"the plain target": found.plain, **{setting.flags: timed for setting, timed in found.timed.items()}}
    lost = {name: load for name, load in loads.items() if load and load.failed}
    return "".join(f"{load.failed} of {load.requests} requests to {name} failed\n" for name, load in lost.items())


def write_tune_report(found: SearchState, folder: Path, conditions: Mapping[str, Any]) -> None:
    """Write tune.json, which says under what `conditions` the search was made, and tune.png."""
    write_json(folder / REPORT, {**conditions, **as_json(found)})
    _picture(found, folder / PICTURE)


def as_json(found: SearchState) -> dict[str, Any]:
    """Return all of the search, settings fastest predicted first; times in seconds, without `plain` in units of it."""
    best, seconds = found.best()
    return {
        "best": best._asdict() | {"speed_up": found.speed_up(seconds), "flags": best.flags},
        "plain": asdict(found.plain) if found.plain else None,
        "verification_cost": asdict(found.cost().cost),
        "settings": [
            setting._asdict()
            | {
                "accept_length": found.gains[setting].accept_length,
                "standard_error": found.gains[setting].standard_error,
                "tokens_per_verification": found.gains[setting].tokens,
                "seconds_per_token": seconds,
                "expected_before_timing": found.expected.get(setting),
                "timed": asdict(found.timed[setting]) if setting in found.timed else None,
                "failed": found.failed.get(setting),
            }
            for setting, seconds in found.predicted().items()
        ],
    }


def _picture(found: SearchState, path: Path) -> None:
    """Draw accept length against time per token: each setting as predicted, and as measured where it was."""
    scale, predicted = 1000 if found.plain else 1, found.predicted()
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for topk in sorted({setting.topk for setting in predicted}):
        points = [(found.gains[one].accept_length, predicted[one] * scale) for one in predicted if one.topk == topk]
        label = "chains" if topk == 1 else f"trees, topk {topk}"
        lengths, times = zip(*points, strict=True)
        axes.scatter(lengths, times, s=14, alpha=0.6, label=f"{label} (predicted)")
    measured = [(one.gain.accept_length, one.seconds_per_token * scale) for one in found.timed.values() if one.gain]
    if measured:
        lengths, times = zip(*measured, strict=True)
        axes.scatter(lengths, times, s=70, marker="x", color="black", label="measured")
    axes.axhline(found.plain.seconds_per_token * scale if found.plain else 1, color="grey", label="plain target")
    axes.set_xlabel("accept length")
    axes.set_ylabel("time per token [ms]" if found.plain else "time per token [plain target = 1]")
    axes.legend()
    figure.savefig(path, dpi=120)
