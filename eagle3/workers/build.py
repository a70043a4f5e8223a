"""From a config to the workers of a stage."""

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
        gpus = _gpus_of_target(config) if servers is None else config.launch.tp_size * servers
    logs = Path(config.out_dir) / "logs"
    return cli.build(config.workers, leave_out=["gpus"], gpus=gpus, logs=logs.absolute())


def _gpus_of_target(config: DictConfig) -> int:
    if config.target.device == "auto" and config.workers.get("address", "") == "":  # a cluster's nodes are not this one
        return int(torch.cuda.is_available())
    return int(config.target.device != "cpu")
