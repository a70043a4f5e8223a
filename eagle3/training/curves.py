"""The curves of a training in RUN/curves.png, drawn by a callback when it ends, or by a command at any time:

python -m eagle3.training.curves RUN                              # RUN/curves.png
python -m eagle3.training.curves RUN OTHER_RUN --out both.png     # several runs in one picture
python -m eagle3.training.curves RUN --dark --out dark.png        # for a dark page
"""

import argparse
import csv
import logging
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning import Callback, LightningModule, Trainer

from eagle3.cli import exit_with
from eagle3.errors import InputError, require_packages
from eagle3.storage.files import atomic_write

log = logging.getLogger(__name__)
PICTURE = "curves.png"


class Curve(NamedTuple):
    steps: list[int]
    values: list[float]


class Panel(NamedTuple):
    metrics: dict[str, str]  # each with its words in the legend
    in_order: bool = False  # the metrics are numbered: colours of one scale instead of unrelated ones
    log_scale: bool = False
    from_zero_to: float | None = None  # the axis begins at 0 and ends here or above; None: around the values
    ticks: str = ""  # format of the numbers at the axis, or "percent"; "": matplotlib's
    smoothed: bool = True  # many values of the training are pale, under their running mean


PANELS = {  # by title with unit
    "loss (nats)": Panel({"train/loss": "training", "val/loss": "validation"}),
    "validation loss by step of the unroll (nats)": Panel({"val/loss_*": "step {}"}, in_order=True),
    "accept length (tokens)": Panel({
        "train/accept_length": "training, every anchor",
        "val/accept_length": "validation, every anchor",
        "val/served_accept_length_*": "served, {} drafts",
    }),
    "share of served chains with so many drafts accepted": Panel(
        {"val/served_reach_*": "{} or more"}, in_order=True, from_zero_to=0.01, ticks="percent"
    ),
    "learning rate": Panel({"train/lr": "learning rate"}, ticks="{x:g}", smoothed=False),
    "gradient norm before clipping": Panel({"train/grad_norm": "gradient norm"}, log_scale=True),
    "throughput (per second)": Panel(
        {"train/anchors_per_s": "anchors", "train/tokens_per_s": "tokens"}, from_zero_to=1, ticks="{x:,.0f}"
    ),
    "share of time spent waiting for data": Panel(
        {"train/data_wait_share": "waiting"}, from_zero_to=0.05, ticks="percent"
    ),
}  # fmt: skip
MOST_LINES = 8  # per panel and run
DARK = {f"{part}.facecolor": "#0d1117" for part in ("figure", "axes", "savefig")} | {"grid.color": "#8b949e"}
MANY_POINTS = 100  # from which on values of the training are smoothed
FEW_POINTS = 40  # up to which each point of a line has a marker: a line of one point is invisible without
CHOSEN = "val/served_accept_length_*"  # the longest of these chooses the best checkpoint


class Curves(Callback):
    """Draws RUN/curves.png when the training ends. Drawing takes a second or two, in which a GPU would wait."""

    def __init__(self, *, run_dir: str) -> None:
        self.run_dir = Path(run_dir)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._draw(trainer)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.save()  # writes the latest rows of metrics.csv
        if trainer.is_global_zero and (self.run_dir / "metrics.csv").is_file():
            try:
                write_curves([self.run_dir], self.run_dir / PICTURE)
            except Exception as error:  # checkpoints are saved after this: a picture must not prevent that
                log.warning("%s is not drawn: %s: %s", PICTURE, type(error).__name__, error)


def read_curves(run: Path) -> dict[str, Curve]:
    """Read RUN/metrics.csv by metric, without a last line that is still being written."""
    path = run / "metrics.csv"
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the folder of a training: outputs/train/…")
    text = path.read_text()
    curves: dict[str, Curve] = defaultdict(lambda: Curve([], []))
    for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        for name, value in row.items():
            if value and "/" in name:  # a metric; the other columns are epoch and step
                curves[name].steps.append(int(row["step"]))
                curves[name].values.append(float(value))
    return dict(curves)


def draw_runs(runs: Sequence[Path]) -> Any:
    """Return a matplotlib figure of one or several runs, which are named after their folders."""
    names = [run.resolve().name for run in runs]
    if len(runs) == 1 or len(set(names)) < len(names):  # many folders are called run
        names = ["/".join(run.resolve().parts[-2:]) for run in runs]
    unique = len(set(names)) == len(names)
    return draw({name if unique else str(run): read_curves(run) for run, name in zip(runs, names, strict=True)})


def draw(runs: Mapping[str, Mapping[str, Curve]]) -> Any:
    """Draw a panel for what was measured, over steps counted from 1 as in the log. Colours distinguish the metrics of
    one run, or else the runs, with paler later metrics."""
    from matplotlib.figure import Figure

    measured = {title: panel for title, panel in PANELS.items() if _has_a_line(panel, runs)}
    rows = max(1, -(-len(measured) // 2))
    figure = Figure(figsize=(13, 3 * rows + 0.6), layout="constrained")
    places = list(figure.subplots(rows, 2, squeeze=False, sharex=True).flat)
    for axes in places[len(measured) :]:
        axes.remove()
    for axes, (title, panel) in zip(places, measured.items(), strict=False):
        for number, (run, curves) in enumerate(runs.items()):
            # Of several runs a numbered metric has fewer lines each: a legend of twenty is not read.
            shown = _shown(panel.metrics, curves, max(2, MOST_LINES // (len(runs) if panel.in_order else 1)))
            for place, (metric, words) in enumerate(shown.items()):
                style: dict[str, Any] = {"label": words if len(runs) == 1 else f"{run}: {words}"}
                if len(runs) > 1:
                    style |= {"color": f"C{number}", "alpha": 1 - 0.7 * place / len(shown)}
                elif panel.in_order:
                    style |= {"color": _of_a_sequence(place, len(shown))}
                _plot(axes, curves[metric], style, smoothed=panel.smoothed and metric.startswith("train/"))
            if title.startswith("accept length") and len(runs) == 1:
                _mark_best(axes, curves)
        axes.set_title(title, loc="left", fontsize="medium")
        _set_axis(axes, panel)
        if len(axes.get_legend_handles_labels()[1]) > 1:  # next to the data, never on them
            axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1.02))
    figure.suptitle(", ".join(runs))
    figure.supxlabel("optimizer step")
    return figure


def _has_a_line(panel: Panel, runs: Mapping[str, Mapping[str, Curve]]) -> bool:
    """Say whether a panel would show more than single points."""
    return any(len(curves[metric].steps) > 1 for curves in runs.values() for metric in _shown(panel.metrics, curves))


def _plot(axes: Any, curve: Curve, style: dict[str, Any], *, smoothed: bool) -> None:
    """Draw a metric: few points with markers, many pale ones under their running mean if it is smoothed."""
    steps = [step + 1 for step in curve.steps]
    if len(steps) <= FEW_POINTS:
        style |= {"marker": "o", "markersize": 3.5}
    [line] = axes.plot(steps, curve.values, linewidth=1.3, **style)
    if smoothed and len(steps) >= MANY_POINTS:
        axes.plot(steps, _running_mean(curve.values), linewidth=1.3, **style | {"color": line.get_color()})
        line.set(alpha=0.4 * style.get("alpha", 1), label="", linewidth=0.8)


def _running_mean(values: Sequence[float]) -> Any:
    """Return the mean of each value and its neighbours, a twenty-fifth of all; at the ends of those that exist."""
    window = np.ones(1 + 2 * (len(values) // 50))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _set_axis(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelbottom=True)
    # matplotlib warns of a logarithmic axis without a positive value, such as norms that all are 0.
    if panel.log_scale and any(value > 0 for line in axes.lines for value in line.get_ydata()):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if panel.from_zero_to is not None:
        axes.set_ylim(0, max(panel.from_zero_to, axes.get_ylim()[1]))
    if panel.ticks:
        axes.yaxis.set_major_formatter(PercentFormatter(1) if panel.ticks == "percent" else panel.ticks)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _of_a_sequence(place: int, number: int) -> Any:
    """Return the colour of one of several lines that are in order, without those too close to the background."""
    from matplotlib import colormaps, rcParams
    from matplotlib.colors import to_rgb

    first, last = (0.0, 0.88) if sum(to_rgb(rcParams["axes.facecolor"])) > 1.5 else (0.3, 1.0)
    return colormaps["viridis"](first + (last - first) * place / max(1, number - 1))


def _mark_best(axes: Any, curves: Mapping[str, Curve]) -> None:
    """Mark the highest value of the longest chains, and write it into the legend."""
    from matplotlib import rcParams

    longest = list(_shown({CHOSEN: ""}, curves))[-1:]
    for steps, values in (curves[metric] for metric in longest):
        best = max(range(len(values)), key=values.__getitem__)
        words = f"best: {values[best]:.2f} at step {steps[best] + 1}"
        axes.plot([steps[best] + 1], [values[best]], "*", color=rcParams["text.color"], markersize=9, label=words)


def _shown(names: Mapping[str, str], curves: Mapping[str, Curve], most: int = MOST_LINES) -> dict[str, str]:
    """Return at most so many metrics of a panel with their words: of many TTT steps or depths every second, third, …"""
    found = {
        name: words.format(name.rpartition("_")[2])
        for pattern, words in names.items()
        for name in sorted(curves, key=_by_number)
        if fnmatch(name, pattern)
    }
    kept = list(found)[:: -(-len(found) // most) or 1]
    return {name: found[name] for name in kept}


def _by_number(metric: str) -> int:
    number = metric.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


def write_curves(runs: Sequence[Path], out: Path, *, dark: bool = False) -> None:
    require_packages("matplotlib", extra="bench", needed_by=PICTURE)
    from matplotlib import style

    with style.context(["dark_background", DARK] if dark else []), atomic_write(out) as file:
        draw_runs(runs).savefig(file, format="png", dpi=100, metadata={"Software": None})


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of trainings")
    parser.add_argument("--out", type=Path, help=f"the picture; default RUN/{PICTURE}, for several runs ./{PICTURE}")
    parser.add_argument("--dark", action="store_true", help="light lines on a dark background")
    options = parser.parse_args(arguments)
    out = options.out or (options.runs[0] / PICTURE if len(options.runs) == 1 else Path(PICTURE))
    try:
        write_curves(options.runs, out, dark=options.dark)
    except InputError as error:
        exit_with(str(error), 1)
    print(out)


if __name__ == "__main__":
    main(sys.argv[1:])
