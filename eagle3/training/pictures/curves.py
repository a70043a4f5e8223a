"""The curves of one training, or of several in one picture."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, Formatter, LogFormatter, PercentFormatter

from eagle3.training.curves import Curve

COLUMNS = 2
LINES = ("-", "--", ":")  # of a panel's metrics where colours tell runs apart
MOST_NAMES = 12  # of runs in the legend: more would take the place of the curves
MOST_NUMBERED = 8  # metrics of one name and a number: of more steps some, the first and the last among them
SHARE, RATE = "share", "per second"
FORMATS: dict[str, Callable[[], Formatter]] = {
    SHARE: partial(PercentFormatter, 1),
    RATE: partial(EngFormatter, sep=" "),
}


@dataclass(frozen=True)
class Panel:
    """What is drawn over one another; `loss_*` are all of that name with a number."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    log: bool = False
    from_zero: bool = False


PANELS = (
    Panel("loss", "nats", ("train/loss", "val/loss")),
    Panel("loss by step of the unroll", "nats", ("val/loss_*",)),
    Panel("accept length", "tokens", ("train/accept_length", "val/accept_length", "val/served_accept_length_*")),
    Panel("served chains that reach a depth", SHARE, ("val/served_reach_*",), from_zero=True),
    Panel("learning rate", "", ("train/lr",), from_zero=True),
    Panel("gradient norm before clipping", "", ("train/grad_norm",), log=True),
    Panel("throughput", RATE, ("train/anchors_per_s", "train/tokens_per_s"), from_zero=True),
    Panel("time in which data were waited for", SHARE, ("train/data_wait_share",), from_zero=True),
)


def curves_figure(runs: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Draw every panel. Of one run, each metric has its colour; of several, each run has, and metrics differ by their
    lines: thin in training, with dots in validation."""
    rows = -(-len(PANELS) // COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 2.8 * rows), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, sharex=True)
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        _draw_panel(axes, panel, runs)
    for axes in grid[-1]:
        axes.set_xlabel("optimizer step")
    if 1 < len(runs) <= MOST_NAMES:
        handles = [Line2D([], [], color=f"C{number % 10}", label=name) for number, name in enumerate(runs)]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(runs)))
    elif len(runs) == 1:
        figure.suptitle(next(iter(runs)))
    return figure


def _draw_panel(axes: Axes, panel: Panel, runs: Mapping[str, Mapping[str, Curve]]) -> None:
    alone, legend = len(runs) == 1, {}
    for number, curves in enumerate(runs.values()):
        for metric, style in _styles(panel, curves, f"C{number % 10}", alone).items():
            axes.plot(curves[metric].steps, curves[metric].values, **style)
            legend[metric] = style if alone else style | {"color": "0.3"}
    axes.set_title(panel.title, pad=18 if len(legend) > 1 else None)
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.25)
    axes.tick_params(labelbottom=True)
    if panel.unit in FORMATS:
        axes.yaxis.set_major_formatter(FORMATS[panel.unit]())
    if panel.log and legend:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())  # by itself a power of ten times each
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    if len(legend) > 1:
        _draw_legend(axes, legend)
    if not legend:
        axes.text(0.5, 0.5, "nothing logged yet", ha="center", transform=axes.transAxes, color="0.5")


def _draw_legend(axes: Axes, styles: Mapping[str, dict]) -> None:
    """Name the metrics in a line over the axes, where no curve can lie beneath; of numbered ones the first in full."""
    labels: list[str] = []
    for metric in styles:
        beginning, _, number = metric.rpartition("_")
        labels.append(number if any(label.startswith(f"{beginning}_") for label in labels) else metric)
    handles = [Line2D([], [], label=label, **style) for label, style in zip(labels, styles.values(), strict=True)]
    axes.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(handles),
        frameon=False,
        fontsize="x-small",
        borderpad=0,
        borderaxespad=0.3,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=0.8,
    )


def _styles(panel: Panel, curves: Mapping[str, Curve], run_colour: str, alone: bool) -> dict[str, dict]:
    """Return how each metric of the panel that the run has is drawn; of numbered ones the first is the strongest."""
    styles = {}
    for number, name in enumerate(panel.metrics):
        found = _numbered(name, curves)
        for place, metric in enumerate(found):
            later = place / max(1, len(found) - 1)
            colour = colormaps["viridis"](0.85 * later) if name.endswith("*") else f"C{number}"
            style = {"linewidth": 1.0} if metric.startswith("train/") else {"marker": "o", "markersize": 3}
            of_run = {"color": run_colour, "linestyle": LINES[number], "alpha": 1 - 0.7 * later}
            styles[metric] = style | ({"color": colour} if alone else of_run)
    return styles


def _numbered(name: str, curves: Mapping[str, Curve]) -> list[str]:
    if not name.endswith("*"):
        return [name] if name in curves else []
    pattern = re.compile(re.escape(name[:-1]) + r"(\d+)$")
    found = sorted((int(match[1]), metric) for metric in curves if (match := pattern.match(metric)))
    shown = np.linspace(0, len(found) - 1, min(len(found), MOST_NUMBERED)).round().astype(int)
    return [found[place][1] for place in shown]
