"""Which kernels under `FlashAttention` can run, and why others cannot."""

from importlib.util import find_spec

import torch

from eagle3.errors import install_command
from eagle3.head.fast.flash_kernels import FlashAttnPackage, TorchFlash, VarlenKernel

FASTEST_FIRST = ("triton", "flash", "torch_flash")  # benchmarks/results/attention.json


def flash_kernel(name: str) -> VarlenKernel:
    if name == "triton":
        from eagle3.head.fast.triton_flash import TritonFlash

        return TritonFlash()
    return FlashAttnPackage() if name == "flash" else TorchFlash()


def flash_obstacle(name: str, device: torch.device, precision: str, head_dim: int) -> str | None:
    """Return why this run cannot use a kernel; None if it can. `precision` is the trainer's."""
    if device.type != "cuda":
        return f"needs a CUDA GPU (trainer.accelerator=gpu), this run is on the {device.type.upper()}"
    if precision != "bf16-mixed":
        return f"computes in half precision (trainer.precision=bf16-mixed), here trainer.precision={precision}"
    if name == "triton":
        return _triton_obstacle(device, head_dim)
    if head_dim % 8 or head_dim > 256:
        return f"wants a multiple of 8 channels a head, at most 256, here model.head_dim={head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs a GPU of compute capability 8.0 or more, this is a {torch.cuda.get_device_name(device)}"
    if name == "torch_flash" and not torch.backends.cuda.is_flash_attention_available():
        return "is left out of this build of PyTorch (pip install torch has it)"
    return _package_obstacle() if name == "flash" else None


def _triton_obstacle(device: torch.device, head_dim: int) -> str | None:
    if head_dim not in (16, 32, 64, 128, 256):
        return f"wants 16, 32, 64, 128 or 256 channels a head, here model.head_dim={head_dim}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"is made for Hopper (compute capability 9), this is a {torch.cuda.get_device_name(device)}"
    if not find_spec("triton"):
        return "needs Triton, a part of PyTorch's CUDA builds for Linux"
    return None


def _package_obstacle() -> str | None:
    try:
        FlashAttnPackage()
    except ImportError as error:  # also where it was built for another PyTorch
        return f"needs flash-attn 2.7 or 2.8 ({install_command('flash')}): {' '.join(str(error).split())}"
    return None
