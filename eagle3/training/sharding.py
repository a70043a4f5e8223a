"""Weights, gradients and optimizer state sharded over the ranks (FSDP2), for heads too large for one GPU."""

import lightning
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


def shard_over_ranks(module: lightning.LightningModule, mesh: DeviceMesh, *, compute_dtype: torch.dtype | None) -> None:
    """Shard the parameters: they are gathered for a step, and gradients are averaged and scattered after it.

    In a two-dimensional mesh the first dimension has replicas (machines), the second shards (GPUs of one machine).

    All parameters are one group: the unroll uses every weight K times, and would gather it K times if it were freed.
    `compute_dtype` is the dtype of the gathered weights; shards, their gradients and AdamW's state keep theirs.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for name in ("training_step", "validation_step"):  # Lightning calls these instead of `forward`
        register_fsdp_forward_method(module, name)
