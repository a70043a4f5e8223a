"""The device of a target, and its free memory."""

import re
from importlib.util import find_spec
from pathlib import Path

import torch

from eagle3.errors import InputError, first_line


def resolve_device(device: str) -> torch.device | None:
    """None stands for `balanced`: layers spread over every GPU."""
    if device == "balanced":
        if find_spec("accelerate") is None:
            raise InputError("target.device=balanced needs accelerate: pip install accelerate, or target.device=cuda")
        return None
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        rule = "it must be auto, balanced, cpu, cuda or cuda:INDEX and be there"
        raise InputError(f"target.device={device}: {rule} ({first_line(error)})") from error


def free_bytes(device: str) -> int:
    """Return the memory that a target could be loaded into."""
    place = resolve_device(device)
    if place is None or place.type == "cuda":
        gpus = range(torch.cuda.device_count()) if place is None else [place]
        return sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0
