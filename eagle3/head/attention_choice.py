"""Which attention a run trains with: config key `attention`."""

import logging
from functools import partial
from importlib.util import find_spec

import torch

from eagle3.errors import InputError
from eagle3.head.attention import DenseAttention, MakeAttention, PaddedAttention
from eagle3.head.fast.flash_attention import FlashAttention
from eagle3.head.fast.flash_kernels import FlashAttnPackage, TorchFlash, VarlenKernel

log = logging.getLogger(__name__)

FASTEST_FIRST = ("triton", "flash", "torch_flash", "padded")  # benchmarks/results/attention.json
NAMES = ("auto", *FASTEST_FIRST, "dense")


def require_known(name: str) -> None:
    if name not in NAMES:
        raise InputError(f"attention={name} is none of {', '.join(NAMES)}; attention=auto takes the fastest")


def choose_attention(name: str, *, device: torch.device, precision: str, head_dim: int) -> MakeAttention:
    """The attention of that name; `auto` takes the first of FASTEST_FIRST that can run, and the log says why.

    `precision` is the trainer's, e.g. "bf16-mixed". InputError where the named one cannot run.
    """
    require_known(name)
    obstacles = {each: _obstacle(each, device, precision, head_dim) for each in NAMES[1:]}
    if name == "auto":
        name = next(each for each in FASTEST_FIRST if not obstacles[each])
        reasons: dict[str | None, list[str]] = {}
        for each in FASTEST_FIRST[: FASTEST_FIRST.index(name)]:
            reasons.setdefault(obstacles[each], []).append(each)
        passed_over = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        log.info("attention=auto takes %s: %s", name, passed_over or "the fastest of all")
    elif obstacles[name]:
        raise InputError(f"attention={name} {obstacles[name]}; attention=auto takes what can run here")
    return _made(name)


def _made(name: str) -> MakeAttention:
    if name == "dense":
        return DenseAttention
    if name == "padded":
        return PaddedAttention
    return partial(FlashAttention, kernel=_kernel(name))


def _kernel(name: str) -> VarlenKernel:
    if name == "triton":
        from eagle3.head.fast.triton_flash import TritonFlash

        return TritonFlash()
    return FlashAttnPackage() if name == "flash" else TorchFlash()


def _obstacle(name: str, device: torch.device, precision: str, head_dim: int) -> str | None:
    """Why this run cannot use an attention; None if it can."""
    if name in ("dense", "padded"):
        return None
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
    if name == "flash":
        return _package_obstacle()
    return None


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
        return f"needs flash-attn 2.7 or 2.8 (pip install 'eagle3[flash]'): {' '.join(str(error).split())}"
    return None
