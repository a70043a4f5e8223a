"""The devices that a training runs on, by the keys of trainer."""

from typing import Any

import torch


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
    listed = listed_devices(trainer["devices"])
    if listed is None:
        listed = [*range(torch.cuda.device_count() if trains_on_gpu(trainer) else 1)]
    return trainer["num_nodes"] > 1 or len(listed) > 1
