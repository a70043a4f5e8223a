"""Weights, gradients and optimizer state spread over the ranks (FSDP2), for heads too large to copy to each."""

import lightning
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


def shard_over_ranks(module: lightning.LightningModule, mesh: DeviceMesh, *, compute_dtype: torch.dtype | None) -> None:
    """Turn the parameters into shards: gathered for a step, gradients averaged and scattered after it.

    Over a mesh of two dimensions the first holds copies (machines), the second the shards (GPUs of one machine).

    One group for all: the unroll uses every weight K times, so that freeing them in between would gather them K times.
    `compute_dtype` is what the gathered weights are cast to; shards, their gradients and AdamW stay as they are.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for name in ("training_step", "validation_step"):  # what Lightning calls in place of `forward`
        register_fsdp_forward_method(module, name)
