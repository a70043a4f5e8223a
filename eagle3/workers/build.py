"""Builds the workers of a stage from a config."""

from pathlib import Path

import torch
from omegaconf import DictConfig

from eagle3 import cli
from eagle3.workers.task import Workers


def workers_of(config: DictConfig, *, servers: int | None) -> Workers:
    """Make the workers; each has the GPUs for `servers` of its own, or, where that is None, for the target itself."""
    if "gpus" not in config.workers:
        return cli.build(config.workers)
    gpus = config.workers.gpus
    if gpus is None:
        gpus = int(target_on_gpu(config)) if servers is None else config.launch.tp_size * servers
    logs = Path(config.out_dir) / "logs"
    return cli.build(config.workers, leave_out=["gpus"], gpus=gpus, logs=logs.absolute())


def target_on_gpu(config: DictConfig) -> bool:
    """Say whether the target runs on GPUs where the workers are."""
    if config.target.device != "auto":
        return config.target.device != "cpu"
    if "address" in config.workers:  # a cluster's nodes are not this one
        return config.workers.gpus != 0
    return torch.cuda.is_available()
