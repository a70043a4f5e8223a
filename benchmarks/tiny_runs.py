"""A training and a sweep on the bundled target, whose curves and jobs the pages show: python benchmarks/tiny_runs.py

Trains on what `make quickstart` leaves in outputs/quickstart/data; about a quarter of an hour on two cores.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from result import write_result

from eagle3.training.curves import read_curves
from eagle3.training.sweep import read_jobs

ROOT = Path(__file__).parent.parent
SWEEP = ["data.limit_samples=400", "trainer.max_epochs=1", "trainer.val_check_interval=1.0"]
SPACE = ["model=eagle3,eagle31", "optim.lr=1e-3,6e-3,3e-2", "loss.decay=0.6,0.9"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="outputs/quickstart/data", help="made by benchmarks/quickstart.py")
    parser.add_argument("--runs", type=Path, default=Path("outputs/tiny_runs"), help="where they are written")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tiny_runs.json"))
    options = parser.parse_args()
    run, sweep = options.runs / "run", options.runs / "sweep"
    given = [f"data.path={options.data}/features", "experiment=quickstart"]
    train(*given, f"hydra.run.dir={run}", "trainer.log_every_n_steps=5")
    train("-m", *given, *SWEEP, *SPACE, f"hydra.sweep.dir={sweep}")
    curves = {
        name: {"steps": curve.steps, "values": [float(f"{value:.4g}") for value in curve.values]}
        for name, curve in sorted(read_curves(run).items())
    }
    jobs = sorted(read_jobs(sweep), key=lambda job: int(job["name"]))
    kept = [{key: job[key] for key in ("settings", "metric", "mode", "score", "steps")} for job in jobs]
    write_result(options.out, {"curves": curves, "sweep": kept})


def train(*arguments: str) -> None:
    subprocess.run([sys.executable, "train.py", *arguments, "progress=false"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
