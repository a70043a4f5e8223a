"""The device of a target, and its free memory."""

import logging
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from eagle3.errors import InputError, first_line

log = logging.getLogger(__name__)


@cache  # warned once
def resolve_device(device: str) -> torch.device | None:
    """None stands for `balanced`: layers spread over every GPU."""
    if device == "balanced":
        if find_spec("accelerate") is None:
            raise InputError("target.device=balanced needs accelerate: pip install accelerate, or target.device=cuda")
        return None
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if unseen := unseen_gpus():
            log.warning("target.device=auto: %s, so the CPU computes; fix that, or set target.device=cpu", unseen)
        return torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        rule = "it must be auto, balanced, cpu, cuda or cuda:INDEX and be there"
        raise InputError(f"target.device={device}: {rule} ({first_line(error)})") from error


def unseen_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """Say why PyTorch sees none of the GPUs that the driver lists; None if it lists none, or none is to be seen."""
    listed = [*driver.iterdir()] if driver.is_dir() else []
    if not listed or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"PyTorch sees no GPU where the driver lists {len(listed)} ({first_line(error)})"
    return None


def free_bytes(device: str) -> int:
    """Return the memory that a target could be loaded into."""
    place = resolve_device(device)
    if place is None or place.type == "cuda":
        gpus = range(torch.cuda.device_count()) if place is None else [place]
        return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0
