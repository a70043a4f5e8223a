"""The ranked table of a sweep, printed when it ends, or while it runs by this command:

python -m eagle3.training.sweep outputs/sweep/…
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from omegaconf import DictConfig, OmegaConf

from eagle3.adapters.hydra import Callback, RunMode
from eagle3.cli import exit_with
from eagle3.errors import InputError
from eagle3.hydra_run import hydra_sweep_dir
from eagle3.secrets import public
from eagle3.storage.files import write_whole
from eagle3.storage.lock import hold
from eagle3.storage.records import read_sealed_json

# Hydra's own keys that decide which jobs a sweep has, and their folders; a launcher may change.
OF_JOBS = ("hydra/sweeper", "hydra.sweeper", "hydra.sweep.subdir")
SEARCH = "hparams_search="
SEED = "seed="
NUMBER = Path(".hydra") / "job"  # in the folder of a job
SUBDIR = "give hydra.sweep.subdir='${hydra:job.num}', the default, or another that differs for each job"


class RankedTable(Callback):
    """Hydra callback that prints the table when all jobs have ended; the exit status is 1 if one has no result."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a folder with an earlier sweep, unless this is the same sweep and continues it."""
        if first_rank() and read_jobs(Path(config.hydra.sweep.dir)):
            require_same_sweep(config)
        require_direction(config)
        for name in ("n_trials", "n_jobs"):
            if (number := config.hydra.sweeper.get(name, 1)) < 1:
                exit_with(f"hydra.sweeper.{name}={number} must be 1 or more", 1)
        require_folder_of_each_job(config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """End a sweep whose jobs would share a folder, or are outside the sweep's: the table would not have them."""
        if config.hydra.mode is not RunMode.MULTIRUN:
            refuse_settings_of_a_sweep(config)
            return
        sweep, folder = hydra_sweep_dir(config.hydra), Path(config.hydra.runtime.output_dir)
        number, recorded = str(config.hydra.job.num), folder / NUMBER
        subdir = f"hydra.sweep.subdir={config.hydra.sweep.subdir}"
        if Path(os.path.normpath(sweep)) not in folder.parents:
            exit_with(f"{subdir} is not a folder below hydra.sweep.dir={sweep}; {SUBDIR}", 1)
        if recorded.is_file() and recorded.read_text() != number:
            exit_with(f"{subdir} is the folder of jobs {recorded.read_text()} and {number}; {SUBDIR}", 1)
        write_whole(recorded, number.encode())

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not first_rank():  # other ranks end before the first one has written the results
            return
        directory = Path(config.hydra.sweep.dir)
        if not read_jobs(directory):
            exit_with("the sweep has no jobs: a range(…) is empty, or a glob(…) fits no option; correct it", 1)
        try:
            print(ranked_table(directory))
        except InputError as error:  # which Hydra would turn into a warning
            exit_with(str(error), 1)
        if any(job["score"] is None for job in read_jobs(directory)):
            sys.exit(1)


def refuse_settings_of_a_sweep(config: DictConfig) -> None:
    """Refuse what a single run ignores."""
    given = config.hydra.overrides
    for each in [*given.hydra, *given.task]:
        if each.lstrip("+").startswith(("hydra/sweeper", "hydra.sweeper", "hydra/launcher", "hydra.launcher", SEARCH)):
            exit_with(f"{public(each)} is for a sweep, and this is a single run; add -m, or leave it out", 1)


def require_same_sweep(config: DictConfig) -> None:
    """Refuse other jobs than the folder has: they would have the same names, and the table would mix them."""
    directory = Path(config.hydra.sweep.dir)
    sweep, recorded = f"hydra.sweep.dir={directory} holds an earlier sweep", directory / "multirun.yaml"
    if not recorded.is_file():  # Optuna starts a new study, whose jobs are numbered from 0 again
        exit_with(f"{sweep} that cannot be continued: it has no multirun.yaml, as with Optuna; give another folder", 1)
    earlier = deciding_overrides(OmegaConf.load(recorded))
    if earlier != deciding_overrides(config):
        exit_with(f"{sweep} of other jobs ({' '.join(earlier)}); give its overrides in its order, or another folder", 1)
    if config.ckpt_path != "auto":
        exit_with(f"{sweep}; add ckpt_path=auto to continue it, or give another folder", 1)
    try:
        for job in read_jobs(directory):
            with hold(directory / job["name"]):
                pass  # no other process trains it
    except InputError as error:
        exit_with(str(error), 1)


def deciding_overrides(config: Any) -> list[str]:
    """Return the overrides that decide which jobs a sweep has; ckpt_path only decides where they start."""
    given = config.hydra.overrides
    overrides = [*given.task, *(each for each in given.hydra if each.lstrip("+~").startswith(OF_JOBS))]
    return [public(each) for each in overrides if each.lstrip("+").partition("=")[0] != "ckpt_path"]


def require_direction(config: DictConfig) -> None:
    """Refuse a study that looks for the worst head: by default Optuna's plugin minimises."""
    mode = OmegaConf.select(config, "callbacks.best.mode")
    wanted, given = "minimize" if mode == "min" else "maximize", config.hydra.sweeper.get("direction")
    name = getattr(given, "name", given)
    if name not in (None, wanted):
        exit_with(
            f"hydra.sweeper.direction={name} looks for the worst head: callbacks.best.mode={mode}; give "
            f"hydra.sweeper.direction={wanted}, or hparams_search=optuna, which sets it",
            1,
        )


def require_folder_of_each_job(config: DictConfig) -> None:
    """Refuse what the table could not be made from: one folder for all jobs, or jobs without a record."""
    subdir = OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"]  # type: ignore[index,call-overload]
    if "${" not in str(subdir):
        exit_with(f"hydra.sweep.subdir={subdir} is one folder for all jobs; {SUBDIR}", 1)
    if config.hydra.output_subdir != ".hydra":
        name = config.hydra.output_subdir
        exit_with(
            f"hydra.output_subdir={name} must be .hydra, where the table finds the jobs of a sweep; leave it out", 1
        )


def first_rank() -> bool:
    """Tell if this is the first of the processes that torchrun or a scheduler starts with the same command."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "RANK", "SLURM_PROCID"))


def ranked_table(directory: Path) -> str:
    """Return a line for each job with the settings that differ, the best job first and those without a result last."""
    jobs = sorted(read_jobs(directory), key=rank)
    if not jobs:
        raise InputError(f"{directory} has no jobs of a sweep; give the folder of one, outputs/sweep/…")
    metric = jobs[0]["metric"] or "result"
    shared = shared_settings(jobs)
    width = max(3, *(len(job["name"]) for job in jobs))
    lines = [f"{'rank':>4}  {metric:>13}  {'steps':>6}  {'job':>{width}}  settings"]
    for number, job in enumerate(jobs, start=1):
        score = "no result" if job["score"] is None else f"{job['score']:.4f}"
        settings = " ".join(item for item in job["settings"] if item not in shared)
        lines.append(
            f"{number:>4}  {score:>{max(len(metric), 13)}}  {job['steps']:>6}  {job['name']:>{width}}  {settings}"
        )
    return "\n".join([*lines, *over_seeds(jobs)])


def shared_settings(jobs: list[dict[str, Any]]) -> set[str]:
    return set.intersection(*(set(job["settings"]) for job in jobs)) if len(jobs) > 1 else set()


def by_setting(jobs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group jobs that differ only in their seed, by the settings that not all jobs share."""
    shared = shared_settings(jobs)
    groups: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        others = [each for each in job["settings"] if each not in shared and not each.startswith(SEED)]
        groups.setdefault(" ".join(others) or "all jobs", []).append(job)
    return groups


def seed_setting(job: dict[str, Any]) -> str | None:
    return next((each for each in job["settings"] if each.startswith(SEED)), None)


def over_seeds(jobs: list[dict[str, Any]]) -> list[str]:
    """Return a line for each setting that ran with several seeds: mean and range of its results, the best first."""
    lines = []
    for settings, group in by_setting(jobs).items():
        # A sampler may choose the same settings again: a seed counts once.
        by_seed = {seed_setting(job): job["score"] for job in group if job["score"] is not None}
        if len(scores := [*by_seed.values()]) > 1:
            spread = f"{min(scores):.4f} to {max(scores):.4f}  {len(scores):>5}"
            lines.append((mean(scores), f"{mean(scores):>19.4f}  {spread}  {settings}"))
    lines.sort(reverse=jobs[0].get("mode") != "min")
    return ["", f"{'mean':>19}  {'range':<16}  seeds  settings", *(line for _, line in lines)] if lines else []


def read_jobs(directory: Path) -> list[dict[str, Any]]:
    return [read_job(path, path.relative_to(directory).as_posix()) for path in job_folders(directory)]


def job_folders(directory: Path) -> Iterator[Path]:
    """Yield the folders of a sweep's jobs at any depth: hydra.sweep.subdir may have slashes. Other commands may have
    written there, too, such as a comparison of the jobs."""
    for place, folders, files in os.walk(directory):
        path = Path(place)
        is_job = (path / NUMBER).is_file()
        if path != directory and (is_job or "multirun.yaml" in files):  # which another sweep has
            folders.clear()
            if is_job:
                yield path
        folders.sort()


def read_job(path: Path, name: str) -> dict[str, Any]:
    result = path / "result.json"
    values = {"metric": None, "score": None, "steps": 0}
    if result.is_file():
        values |= read_sealed_json(result, made_by="the same sweep with ckpt_path=auto")
    overrides = [str(item) for item in OmegaConf.load(path / ".hydra" / "overrides.yaml")]
    return {"name": name, "number": int((path / NUMBER).read_text()), "settings": overrides, **values}


def rank(job: dict[str, Any]) -> tuple[bool, float, str]:
    score = job["score"] or 0.0
    return job["score"] is None, score if job.get("mode") == "min" else -score, job["name"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the ranked table of a sweep.")
    parser.add_argument("folder", type=Path, help="e.g. outputs/sweep/rates")
    try:
        print(ranked_table(parser.parse_args().folder))
    except InputError as error:
        exit_with(str(error), 1)
