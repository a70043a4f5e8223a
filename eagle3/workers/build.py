"""Builds the workers of a stage from a run."""

import torch

from eagle3.settings.precomputing import CaptureRun, PrecomputeRun
from eagle3.workers.task import Workers


def build_workers(run: PrecomputeRun, *, servers: int | None) -> Workers:
    """Make the workers; each has the GPUs for `servers` of its own, or, where that is None, for the target itself."""
    if "gpus" not in run.workers.keys:
        return run.workers.build()
    gpus = run.workers.keys["gpus"]
    if gpus is None:
        gpus = int(target_on_gpu(run)) if servers is None else run.launch.tp_size * servers
    logs = run.folder / "logs"
    return run.workers.with_keys(gpus=gpus).build(logs=logs.absolute())


def target_on_gpu(run: CaptureRun) -> bool:
    """Say whether the target runs on GPUs where the workers are."""
    if run.target.device != "auto":
        return run.target.device != "cpu"
    if "address" in run.workers.keys:  # a cluster's nodes are not this one
        return run.workers.keys["gpus"] != 0
    return torch.cuda.is_available()
