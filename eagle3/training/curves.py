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
PANELS = {  # by title with unit: the metrics of a panel
    "loss (nats)": ("train/loss", "val/loss"),
    "loss by TTT step (nats)": ("val/loss_*",),
    "accept length (tokens)": ("train/accept_length", "val/accept_length", "val/served_accept_length_*"),
    "share of served chains that reach a depth": ("val/served_reach_*",),
    "learning rate": ("train/lr",),
    "gradient norm before clipping": ("train/grad_norm",),
    "throughput (per second)": ("train/anchors_per_s", "train/tokens_per_s"),
    "share of time spent waiting for data": ("train/data_wait_share",),
}
LOG_SCALE = ("gradient norm before clipping",)
MOST_LINES = 8  # per panel and run


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


def figure_of_runs(runs: Sequence[Path]) -> Any:
    """Return a matplotlib figure of one or several runs, which are named after their folders."""
    names = [run.resolve().name for run in runs]
    unique = len(set(names)) == len(names)
    return draw({name if unique else str(run): read_curves(run) for run, name in zip(runs, names, strict=True)})


def draw(runs: Mapping[str, Mapping[str, Curve]]) -> Any:
    """Draw the panels. Colours distinguish the metrics of one run, or else the runs, with paler later metrics."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 12), layout="constrained")
    for axes, (title, patterns) in zip(figure.subplots(-(-len(PANELS) // 2), 2).flat, PANELS.items(), strict=True):
        for number, (run, curves) in enumerate(runs.items()):
            metrics = _shown(patterns, curves)
            for place, metric in enumerate(metrics):
                style: dict[str, Any] = {"marker": "."} if metric.startswith("val/") else {"linewidth": 1}
                if len(runs) > 1:
                    style |= {"color": f"C{number}", "alpha": 1 - 0.7 * place / len(metrics)}
                axes.plot(*curves[metric], label=metric if len(runs) == 1 else f"{run}: {metric}", **style)
        # matplotlib warns of a logarithmic axis without a positive value, such as norms that all are 0.
        positive = any(value > 0 for line in axes.lines for value in line.get_ydata())
        axes.set(title=title, yscale="log" if title in LOG_SCALE and positive else "linear")
        axes.grid(alpha=0.25)
        if len(axes.lines) > 1:
            axes.legend(fontsize="x-small")
    figure.suptitle(", ".join(runs))
    figure.supxlabel("optimizer step")
    return figure


def _shown(patterns: Sequence[str], curves: Mapping[str, Curve]) -> list[str]:
    """Return the metrics of a panel; of many TTT steps or depths only every second, third, …"""
    found = [name for pattern in patterns for name in sorted(curves, key=_by_number) if fnmatch(name, pattern)]
    return found[:: -(-len(found) // MOST_LINES) or 1]


def _by_number(metric: str) -> int:
    number = metric.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


def write_curves(runs: Sequence[Path], out: Path) -> None:
    require_packages("matplotlib", extra="bench", needed_by=PICTURE)
    with atomic_write(out) as file:
        figure_of_runs(runs).savefig(file, format="png", dpi=100, metadata={"Software": None})


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
