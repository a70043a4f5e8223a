"""What a command knows of its own run by Hydra: the folder, the command line, and how it is run again."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle3 import ROOT
from eagle3.adapters.hydra import HydraConfig, in_sweep
from eagle3.home import quoted
from eagle3.secrets import public
from eagle3.settings.help import help_page

CONF = str(ROOT / "conf")
OmegaConf.register_new_resolver("help_page", lambda *, _root_: help_page(_root_), replace=True)
OmegaConf.register_new_resolver("job_or", lambda time: job_name() or time, replace=True)
OmegaConf.register_new_resolver("variable", lambda name, other: os.environ.get(name) or other, replace=True)


def job_name() -> str | None:
    """Return what names this run on every machine where a launcher starts its ranks, each at a moment of its own."""
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return f"slurm-{os.environ['SLURM_JOB_ID']}"
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"torchrun-{run}" if run else None


def launched_ranks() -> tuple[int, float] | None:
    """Return on how many machines a launcher has started ranks, and how many on each; None if it has not.

    Only tasks of srun have the variables of a step: a SLURM job without srun has SLURM_NTASKS, too."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ranks, on_each = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return ranks // on_each, on_each
    tasks, nodes = (int(os.environ.get(f"SLURM_STEP_NUM_{each}", 1)) for each in ("TASKS", "NODES"))
    return (nodes, tasks / nodes) if tasks > 1 else None


def launched_rank() -> int:
    """Return the number of this process among those of its launcher, as Lightning finds it; 0 without a launcher."""
    values = (os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return next((int(value) for value in values if value.isdigit()), 0)


def output_dir() -> Path:
    """The folder of this run, also of one job of a sweep."""
    return Path(HydraConfig.get().runtime.output_dir)


def hydra_sweep_dir(hydra: Any) -> Path:
    """The folder of a sweep, also while a job is in its own, with hydra.job.chdir=true."""
    return Path(hydra.runtime.cwd, hydra.sweep.dir)


def own_config_dirs() -> list[str]:
    if not HydraConfig.initialized():  # in a notebook
        return []
    return [source.path for source in HydraConfig.get().runtime.config_sources if source.provider == "command-line"]


def given_keys() -> list[str]:
    """Return the keys that the command line sets; of an option its group. None in a notebook."""
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    return [each.lstrip("+~").partition("=")[0].partition("@")[0].replace("/", ".") for each in overrides]


def in_own_process() -> int:
    """Run this job of a sweep as a command of its own; its exit status.

    For several GPUs: Lightning starts their ranks with the arguments of this process, which are those of all jobs.
    Under SLURM it would leave that to srun, which a launcher has called for one task.
    """
    own = [word for folder in own_config_dirs() for word in ("--config-dir", folder)]
    name = ["--config-name", str(HydraConfig.get().job.config_name)]
    sweep = hydra_sweep_dir(HydraConfig.get())
    folders = [f"hydra.run.dir={quoted(str(output_dir()))}", f"hydra.sweep.dir={quoted(str(sweep))}"]
    of_job = [each for each in HydraConfig.get().overrides.task if not each.startswith("hparams_search=")]
    overrides = [*of_job, *folders]
    command = [sys.executable, sys.argv[0], *own, *name, *overrides]
    with subprocess.Popen(command, env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}) as job:
        try:
            return job.wait()
        except KeyboardInterrupt:
            job.terminate()
            job.wait()
            raise


def how_to_resume(checkpoint: Path) -> str:
    """Say how to resume from the latest checkpoint: the whole command, unless a launcher starts the ranks."""
    if not HydraConfig.initialized():  # a program of the user's own
        return f"resume with ckpt_path={checkpoint}"
    folder = f"hydra.run.dir={quoted(str(output_dir()))}"
    if in_sweep():
        folder = f"hydra.sweep.dir={quoted(HydraConfig.get().sweep.dir)}"
    set_anew = (folder.partition("=")[0], "ckpt_path")
    given = [word for word in sys.argv if word.lstrip("+").partition("=")[0] not in set_anew]
    if job_name():
        return f"resume with the same command and {folder} ckpt_path=auto"
    return f"resume with: {shlex.join(['python', *map(public, given), folder, 'ckpt_path=auto'])}"
