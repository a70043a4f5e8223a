"""The ranked table and the picture at the end of a sweep, also while it runs:

python -m eagle3.training.sweep outputs/sweep/…
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from eagle3.adapters.hydra import Callback
from eagle3.cli import exit_with
from eagle3.errors import install_command
from eagle3.storage.files import atomic_write
from eagle3.storage.records import read_sealed_json

PICTURE = "sweep.png"
LIBRARIES = ("matplotlib", "scipy")  # what the extra `bench` brings


class RankedTable(Callback):
    """Hydra callback: prints the table and draws the picture when all jobs of a sweep have ended; exit status 1 if one
    has no result."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Settings of these jobs would stand beside results of others."""
        directory = Path(config.hydra.sweep.dir)
        if first_rank() and read_jobs(directory):
            exit_with(f"hydra.sweep.dir={directory} holds an earlier sweep; give another folder, or leave it out", 1)
        require_direction(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not first_rank():  # its jobs have ended before the first rank has written their results
            return
        directory = Path(config.hydra.sweep.dir)
        show(directory)
        if any(job["score"] is None for job in read_jobs(directory)):
            sys.exit(1)


def require_direction(config: DictConfig) -> None:
    """A study of Optuna's plugin looks for the smallest value by itself."""
    mode = OmegaConf.select(config, "callbacks.best.mode")
    wanted, given = "minimize" if mode == "min" else "maximize", config.hydra.sweeper.get("direction")
    name = getattr(given, "name", given)
    if name not in (None, wanted):
        exit_with(
            f"hydra.sweeper.direction={name} looks for the worst head: callbacks.best.mode={mode}; take "
            f"hydra/sweeper=search, or hydra.sweeper.direction={wanted}",
            1,
        )


def first_rank() -> bool:
    """Of the processes that torchrun or a scheduler starts with the same command."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID"))


def show(directory: Path) -> None:
    """Draw the picture, say where it is or why there is none, and print the table."""
    try:
        print(f"picture: {write_picture(directory)}")
    except NoPicture as reason:
        print(f"no {PICTURE}: {reason}")
    print(ranked_table(directory))


class NoPicture(Exception):
    """Why there is nothing to draw, or nothing to draw with."""


def write_picture(directory: Path) -> Path:
    """Draw the jobs of a sweep as far as it is, and return where the picture is."""
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise NoPicture(f"it needs {' and '.join(missing)}; install all that it needs: {install_command('bench')}")
    figure = picture(read_jobs(directory), directory.resolve().name)
    with atomic_write(directory / PICTURE) as file:
        figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return directory / PICTURE


def picture(jobs: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Draw the jobs that have a result over the keys that differ among them; a figure of matplotlib."""
    from eagle3.training.pictures.sweep import Job, sweep_figure

    ended = [job for job in jobs if job["score"] is not None]
    told = [dict(item.split("=", 1) for item in job["settings"] if "=" in item) for job in ended]
    keys = [key for key in (told[0] if told else ()) if len({settings.get(key, "") for settings in told}) > 1]
    if not keys:
        raise NoPicture("it shows two results or more, of settings that differ")
    failed = len(jobs) - len(ended)
    return sweep_figure(
        [
            Job({key: settings.get(key, "") for key in keys}, job["score"])
            for settings, job in zip(told, ended, strict=True)
        ],
        metric=ended[0]["metric"],
        smaller_is_better=ended[0]["mode"] == "min",
        title=f"{name}: {len(jobs)} jobs" + (f", {failed} of them without a result" if failed else ""),
    )


def ranked_table(directory: Path) -> str:
    """Jobs of a sweep with the settings that differ, the best first; jobs without a result last."""
    jobs = sorted(read_jobs(directory), key=rank)
    if not jobs:
        return f"{directory} holds no job of a sweep"
    metric = jobs[0]["metric"] or "result"
    shared = set.intersection(*(set(job["settings"]) for job in jobs)) if len(jobs) > 1 else set()
    lines = [f"{'rank':>4}  {metric:>13}  {'steps':>6}  job  settings"]
    for number, job in enumerate(jobs, start=1):
        score = "no result" if job["score"] is None else f"{job['score']:.4f}"
        settings = " ".join(item for item in job["settings"] if item not in shared)
        lines.append(f"{number:>4}  {score:>{max(len(metric), 13)}}  {job['steps']:>6}  {job['name']:>3}  {settings}")
    return "\n".join(lines)


def read_jobs(directory: Path) -> list[dict[str, Any]]:
    return [read_job(path.parent.parent) for path in directory.glob("*/.hydra/overrides.yaml")]


def read_job(path: Path) -> dict[str, Any]:
    result = path / "result.json"
    values = {"metric": None, "score": None, "steps": 0}
    if result.is_file():
        values |= read_sealed_json(result, made_by="the sweep's job")
    overrides = [str(item) for item in OmegaConf.load(path / ".hydra" / "overrides.yaml")]
    return {"name": path.name, "settings": overrides, **values}


def rank(job: dict[str, Any]) -> tuple[bool, float, str]:
    score = job["score"] or 0.0
    return job["score"] is None, score if job.get("mode") == "min" else -score, job["name"]


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        exit_with("give the folder of a sweep: python -m eagle3.training.sweep outputs/sweep/…", 1)
    show(Path(sys.argv[1]))
