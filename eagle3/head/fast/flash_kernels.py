"""The choice of a `VarlenKernel`.

Ours, the fastest on Hopper, is in triton_flash.py. Elsewhere FlashAttention-2 runs: the flash-attn package if it is
there, else PyTorch's copy.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import install_command
from eagle3.head.fast.varlen_kernel import Gradients, LogSumExp, VarlenKernel
from eagle3.head.segments import Segments

FASTEST_FIRST = ("triton", "flash", "torch_flash")  # benchmarks/results/attention.json


class TorchFlash:
    """PyTorch's copy of FlashAttention-2; signatures as in PyTorch 2.9 to 2.13."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, where: Segments) -> tuple[Tensor, Tensor]:
        output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_bounds(where), 0.0, where.causal, return_debug_mask=False
        )
        return output, _without_keys(logsumexp)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        where: Segments,
    ) -> Gradients:
        random_state = torch.empty(2, dtype=torch.uint64, device=query.device)  # not read: there is no dropout
        inputs = (grad_output, query, key, value, output, logsumexp)
        return torch.ops.aten._flash_attention_backward(
            *inputs, *_bounds(where), 0.0, where.causal, random_state, random_state
        )


class FlashAttnPackage:
    """The flash-attn package, 2.7 and 2.8."""

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface

        self.interface = flash_attn_interface

    def forward(self, query: Tensor, key: Tensor, value: Tensor, where: Segments) -> tuple[Tensor, Tensor]:
        output, logsumexp, *_ = self.interface._flash_attn_varlen_forward(
            query, key, value, *_bounds(where), **self._settings(query, where)
        )
        return output, _without_keys(logsumexp)

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        where: Segments,
    ) -> Gradients:
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        inputs = (grad_output, query, key, value, output, logsumexp)
        window = {"window_size_left": -1, "window_size_right": -1}
        off = {"softcap": 0.0, "alibi_slopes": None, "deterministic": False}
        self.interface._flash_attn_varlen_backward(
            *inputs, *grads, *_bounds(where), **self._settings(query, where), **window, **off
        )
        return grads

    def _settings(self, query: Tensor, where: Segments) -> dict[str, Any]:
        return {"dropout_p": 0.0, "softmax_scale": query.shape[-1] ** -0.5, "causal": where.causal}


def _without_keys(logsumexp: LogSumExp) -> LogSumExp:
    """Return -inf where FlashAttention-2 has +inf: at queries of segments without keys."""
    return logsumexp.masked_fill_(logsumexp == torch.inf, -torch.inf)


def _bounds(where: Segments) -> tuple[Tensor, Tensor, int, int]:
    # If no segment has two queries, FlashAttention-2 takes a path for decoding, which needs exactly one in each.
    return where.query_bounds, where.key_bounds, max(where.most_queries, 2), where.most_keys


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
    capability, gpu = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if name == "triton":
        if head_dim not in (16, 32, 64, 128, 256):
            return f"wants 16, 32, 64, 128 or 256 channels a head, here model.head_dim={head_dim}"
        if capability[0] != 9:
            return f"is made for Hopper (compute capability 9), this is a {gpu}"
        return None if find_spec("triton") else "needs Triton, a part of PyTorch's CUDA builds for Linux"
    if head_dim % 8 or head_dim > 256:
        return f"wants a multiple of 8 channels a head, at most 256, here model.head_dim={head_dim}"
    if capability < (8, 0):
        return f"needs a GPU of compute capability 8.0 or more, this is a {gpu}"
    if name == "torch_flash":
        available = torch.backends.cuda.is_flash_attention_available()
        return None if available else "is left out of this build of PyTorch (pip install torch has it)"
    try:
        FlashAttnPackage()
    except ImportError as error:  # also where it was built for another PyTorch
        return f"needs flash-attn 2.7 or 2.8 ({install_command('flash')}): {' '.join(str(error).split())}"
    return None
