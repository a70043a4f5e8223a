"""The devices that a training runs on, by the keys of trainer."""

import os
import socket
from typing import Any

import torch

from eagle3.errors import InputError
from eagle3.hydra_run import launched_ranks


def listed_devices(devices: Any) -> list[int] | None:
    """Return the GPUs that trainer.devices names, as Lightning reads it; None for all."""
    if isinstance(devices, str) and "," in devices:
        return [int(each) for each in devices.split(",") if each]
    if isinstance(devices, list):
        return devices
    return None if devices in ("auto", "-1", -1) else [*range(int(devices))]


def trains_on_gpu(trainer: dict[str, Any]) -> bool:
    return trainer["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def trains_on_several(trainer: dict[str, Any]) -> bool:
    """Say whether the training has several ranks. Lightning's own choice would send the buffers at every step."""
    return trainer["num_nodes"] > 1 or num_devices(trainer) > 1


def num_devices(trainer: dict[str, Any]) -> int:
    listed = listed_devices(trainer["devices"])
    if listed is None:
        return torch.cuda.device_count() if trains_on_gpu(trainer) else 1
    return len(listed)


def require_launched(trainer: dict[str, Any]) -> None:
    """Raise InputError unless the ranks of trainer are those that a launcher has started, if one has: each of them
    would train alone in the same folder, or wait for others in vain."""
    nodes, devices, launched = trainer["num_nodes"], num_devices(trainer), launched_ranks()
    if nodes == 1 < devices:
        _require_loopback(trainer["devices"])
    if launched is None:
        _require_no_other_launcher(nodes * devices)
        os.environ.pop("SLURM_NTASKS", None)  # in a job without srun: Lightning would wait for ranks that nobody starts
    elif launched != (nodes, devices):
        raise InputError(
            f"trainer.num_nodes={nodes} and trainer.devices={trainer['devices']} are {devices} ranks on each of "
            f"{nodes} machines, but the launcher, torchrun or srun, has started {launched[1]:g} on each of "
            f"{launched[0]}; give trainer.num_nodes={launched[0]} trainer.devices={launched[1]:g}, or start as many "
            f"ranks as GPUs"
        )
    elif "SLURM_NTASKS" in os.environ:  # which Lightning reads together with these, though they may be the job's
        os.environ |= {"SLURM_NNODES": str(nodes), "SLURM_NTASKS_PER_NODE": str(devices), "SLURM_JOB_NAME": "train"}


def _require_no_other_launcher(ranks: int) -> None:
    """Raise InputError if something else has started several processes, e.g. mpirun or a PyTorchJob of Kubeflow.

    A launcher that numbers them as torchrun does, and Lightning for the ranks that it starts, sets LOCAL_RANK."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        size = os.environ.get(name, "")
        numbered = "NODE_RANK" in os.environ or ("LOCAL_RANK" in os.environ and size == str(ranks))
        if size.isdigit() and int(size) > 1 and not numbered:
            raise InputError(
                f"{name}={size}: a launcher has started {size} processes, each of which would train alone; start the "
                f"ranks with torchrun or srun, or unset {name}"
            )


def _require_loopback(devices: Any) -> None:
    """Raise InputError where the ranks of one machine cannot connect: torch would try for half an hour."""
    try:
        with socket.socket(type=socket.SOCK_DGRAM) as probe:  # which sends nothing
            probe.connect(("127.0.0.1", 9))
    except OSError as error:
        raise InputError(
            f"trainer.devices={devices}: the ranks of one machine cannot connect ({error.strerror}); start "
            f"its loopback interface with: ip link set lo up, or give trainer.devices=1"
        ) from None
