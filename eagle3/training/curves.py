"""The curves of trainings, also while they run.

python -m eagle3.training.curves RUN                   # RUN/curves.png, as at the end of the training
python -m eagle3.training.curves RUN OTHER_RUN --out both.png     # several in one picture
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.cli import exit_with
from eagle3.errors import InputError, require_packages
from eagle3.storage.files import atomic_write

PICTURE = "curves.png"


@dataclass(frozen=True)
class Curve:
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def read_curves(run: Path) -> dict[str, Curve]:
    """Read RUN/metrics.csv by metric; a last line that is being written is left out."""
    path = run / "metrics.csv"
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the folder of a training: outputs/train/…")
    text = path.read_text()
    curves: dict[str, Curve] = defaultdict(Curve)
    for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        step = int(row["step"])
        for name, value in row.items():
            if value and "/" in name:  # of a metric, not where it stands
                curves[name].steps.append(step)
                curves[name].values.append(float(value))
    return dict(curves)


def figure_of_runs(runs: Sequence[Path]) -> Any:
    """Draw one run, or several in one picture, called like their folders; a figure of matplotlib."""
    from eagle3.training.pictures.curves import curves_figure

    names = [run.resolve().name for run in runs]
    alike = len(set(names)) < len(names)
    return curves_figure({str(run) if alike else name: read_curves(run) for run, name in zip(runs, names, strict=True)})


def write_curves(runs: Sequence[Path], out: Path) -> None:
    """Draw them into a file."""
    with atomic_write(out) as file:
        figure_of_runs(runs).savefig(file, format="png", dpi=100, metadata={"Software": None})


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of trainings")
    parser.add_argument("--out", type=Path, help=f"the picture; by itself RUN/{PICTURE}, of several ./{PICTURE}")
    options = parser.parse_args(arguments)
    out = options.out or (options.runs[0] / PICTURE if len(options.runs) == 1 else Path(PICTURE))
    try:
        require_packages("matplotlib", extra="bench", needed_by=PICTURE)
        write_curves(options.runs, out)
    except InputError as error:
        exit_with(str(error), 1)
    print(out)


if __name__ == "__main__":
    main(sys.argv[1:])
