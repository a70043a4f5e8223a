"""Where the kernels of this project run."""

from importlib.util import find_spec

import torch


def runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """On a GPU with Triton, a part of PyTorch's CUDA builds for Linux; the kernels know no float64."""
    return device.type == "cuda" and dtype != torch.float64 and find_spec("triton") is not None
