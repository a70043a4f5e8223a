"""Jobs of a sweep of train.py whose heads can be compared."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import InputError
from eagle3.serving.head.export import find_checkpoint
from eagle3.training.sweep import SEED, by_setting, read_jobs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A finished job. Jobs of one `setting` differ only in their `seed`, which is empty where the sweep set none."""

    name: str
    folder: Path
    checkpoint: Path
    setting: str
    seed: str

    @property
    def head(self) -> Path:
        """The folder that its best checkpoint is exported to."""
        return self.folder / "head"


@dataclass(frozen=True)
class Jobs:
    """Finished jobs in the order of their sweep, those of a setting together, and why others are left out, by name."""

    sweep: Path
    finished: list[Job]
    left_out: dict[str, str]

    @property
    def has_seeds(self) -> bool:
        """Say whether a setting was trained with several seeds."""
        return len({job.setting for job in self.finished}) < len(self.finished)

    def left_out_line(self) -> str:
        return "left out: " + ", ".join(f"job {name} ({reason})" for name, reason in self.left_out.items())


def find_jobs(sweep: Path) -> Jobs:
    """Find the jobs below a sweep's folder, and warn of those that are left out; InputError if none has a head."""
    jobs = Jobs(sweep, [], {})
    found = sorted(read_jobs(sweep), key=lambda job: job["number"])
    if not found:
        raise InputError(f"sweep={sweep} has no jobs of a sweep; give the folder of one, made by train.py -m")
    for setting, group in by_setting(found).items():
        seeds: dict[str, str] = {}  # to names of jobs
        for job in group:
            seed = next((each.removeprefix(SEED) for each in job["settings"] if each.startswith(SEED)), "")
            checkpoint = _checkpoint(sweep, job)
            if isinstance(checkpoint, Path) and seed in seeds:
                checkpoint = f"as job {seeds[seed]}"
            if isinstance(checkpoint, Path):
                seeds[seed] = job["name"]
                jobs.finished.append(Job(job["name"], sweep / job["name"], checkpoint, setting, seed))
            else:
                jobs.left_out[job["name"]] = checkpoint
    if not jobs.finished:
        raise InputError(f"sweep={sweep} has no finished job; continue it with ckpt_path=auto; {jobs.left_out_line()}")
    if jobs.left_out:
        log.warning("%s", jobs.left_out_line())
    return jobs


def _checkpoint(sweep: Path, job: dict[str, Any]) -> Path | str:
    """Return the best checkpoint of a job, or what it lacks to have one."""
    if job["score"] is None:
        return "no result: failed, or not finished"
    try:
        return find_checkpoint(run=str(sweep / job["name"]), checkpoint=None)
    except InputError:
        return "no checkpoint"
