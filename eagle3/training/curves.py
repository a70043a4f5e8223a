"""The curves of a training in RUN/curves.png, drawn by a callback when it ends, or by a command at any time:

python -m eagle3.training.curves RUN                              # RUN/curves.png
python -m eagle3.training.curves RUN OTHER_RUN --out both.png     # several runs in one picture
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

from lightning import Callback, LightningModule, Trainer

from eagle3.cli import exit_with
from eagle3.errors import InputError, require_packages
from eagle3.storage.files import atomic_write

log = logging.getLogger(__name__)
PICTURE = "curves.png"
PANELS = {  # by title with unit: the metrics of a panel, each with its words in the legend
    "loss (nats)": {"train/loss": "training", "val/loss": "validation"},
    "validation loss by step of the unroll (nats)": {"val/loss_*": "step {}"},
    "accept length (tokens)": {
        "train/accept_length": "training, every anchor",
        "val/accept_length": "validation, every anchor",
        "val/served_accept_length_*": "served, {} drafts",
    },
    "share of served chains with so many drafts accepted": {"val/served_reach_*": "{} or more"},
    "learning rate": {"train/lr": "learning rate"},
    "gradient norm before clipping": {"train/grad_norm": "gradient norm"},
    "throughput (per second)": {"train/anchors_per_s": "anchors", "train/tokens_per_s": "tokens"},
    "share of time spent waiting for data": {"train/data_wait_share": "waiting"},
}
LOG_SCALE = ("gradient norm before clipping",)
NUMBERED = ("validation loss by step of the unroll (nats)", "share of served chains with so many drafts accepted")
FROM_ZERO = (NUMBERED[1], "throughput (per second)", "share of time spent waiting for data")
MOST_LINES = 8  # per panel and run
FEW_POINTS = 40  # up to which each point of a line has a marker: a line of one point is invisible without
CHOSEN = "val/served_accept_length_*"  # the longest of these chooses the best checkpoint


class Curve(NamedTuple):
    steps: list[int]
    values: list[float]


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
    """Draw a panel for what was measured more than once. Colours distinguish the metrics of one run, or else the runs,
    with paler later metrics."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    measured = {
        title: names
        for title, names in PANELS.items()
        if any(len(curves[metric].steps) > 1 for curves in runs.values() for metric in _shown(names, curves))
    }
    rows = max(1, -(-len(measured) // 2))
    figure = Figure(figsize=(13, 3 * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes in panels[len(measured) :]:
        axes.remove()
    for axes, (title, names) in zip(panels, measured.items(), strict=False):
        for number, (run, curves) in enumerate(runs.items()):
            shown = _shown(names, curves)
            for place, (metric, words) in enumerate(shown.items()):
                curve = curves[metric]
                style: dict[str, Any] = {"marker": "o", "markersize": 3.5} if len(curve.steps) <= FEW_POINTS else {}
                if len(runs) > 1:
                    style |= {"color": f"C{number}", "alpha": 1 - 0.7 * place / len(shown)}
                elif title in NUMBERED:  # lines in order, without the palest colour
                    style |= {"color": colormaps["viridis"](0.88 * place / max(1, len(shown) - 1))}
                axes.plot(*curve, linewidth=1.3, label=words if len(runs) == 1 else f"{run}: {words}", **style)
            longest = list(_shown({CHOSEN: ""}, curves))[-1:] if CHOSEN in names and len(runs) == 1 else []
            for steps, values in (curves[metric] for metric in longest):
                best = max(range(len(values)), key=values.__getitem__)
                words = f"best: {values[best]:.2f} at step {steps[best] + 1}"
                axes.plot([steps[best]], [values[best]], "*", color="black", markersize=9, label=words)
        # matplotlib warns of a logarithmic axis without a positive value, such as norms that all are 0.
        positive = any(value > 0 for line in axes.lines for value in line.get_ydata())
        axes.set_yscale("log" if title in LOG_SCALE and positive else "linear")
        if title in FROM_ZERO:
            axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(axes.lines) > 1:  # next to the data, never on them
            axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1.02))
    figure.suptitle(", ".join(runs))
    figure.supxlabel("optimizer step")
    return figure


def _shown(names: Mapping[str, str], curves: Mapping[str, Curve]) -> dict[str, str]:
    """Return the metrics of a panel with their words; of many TTT steps or depths only every second, third, …"""
    numbers = {name: name.rpartition("_")[2] for name in curves}
    in_order = sorted(curves, key=lambda name: int(numbers[name]) if numbers[name].isdigit() else -1)
    found = {
        name: words.format(numbers[name])
        for pattern, words in names.items()
        for name in in_order
        if fnmatch(name, pattern)
    }
    return {name: found[name] for name in list(found)[:: -(-len(found) // MOST_LINES) or 1]}


def write_curves(runs: Sequence[Path], out: Path) -> None:
    require_packages("matplotlib", extra="bench", needed_by=PICTURE)
    with atomic_write(out) as file:
        draw_runs(runs).savefig(file, format="png", dpi=100, metadata={"Software": None})


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of trainings")
    parser.add_argument("--out", type=Path, help=f"the picture; default RUN/{PICTURE}, for several runs ./{PICTURE}")
    options = parser.parse_args(arguments)
    out = options.out or (options.runs[0] / PICTURE if len(options.runs) == 1 else Path(PICTURE))
    try:
        write_curves(options.runs, out)
    except InputError as error:
        exit_with(str(error), 1)
    print(out)


if __name__ == "__main__":
    main(sys.argv[1:])
