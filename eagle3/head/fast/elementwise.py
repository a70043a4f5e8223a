"""The row-wise and element-wise parts of `FusedLayer` in plain PyTorch: references of the kernels on the GPU.

Each writes where it is told to, or over what nobody reads again, so that a kernel goes over memory once: in plain
autograd casts, gathers and concatenations are passes of their own. All compute in float32 at least.

Shapes: N rows, H size of the norm, V rows to choose from, P partial sums, I intermediate size, C channels of a head, W
width of a product.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from eagle3.head.fast.kernel_choice import runs_triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TINY = 1e-30  # a row's largest at least: a row of zeros stays one, and gradients are far above
ALL = slice(None)
PARTIAL_SUMS = 264  # P: two programs for each of an H200's 132 multiprocessors, each with a sum of its own


def choose_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Triton's kernels on a GPU (they know no float64); else this module."""
    if runs_triton(device, dtype):
        from eagle3.head.fast import elementwise_kernels

        return elementwise_kernels
    return sys.modules[__name__]


def rms_norm(
    x: Float[Tensor, "V H"],
    weight: Float[Tensor, " H"] | None,
    eps: float,
    out: Float[Tensor, "N H"],
    index: Int[Tensor, " N"] | None = None,
) -> None:
    """out = norm(x[index]) · weight; index None: all rows in their order."""
    rows = _wide(x if index is None else x[index])
    normed = rows * _scale(rows, eps)
    out.copy_(normed if weight is None else normed * weight)


def rms_norm_backward(
    x: Float[Tensor, "V H"],
    weight: Float[Tensor, " H"],
    eps: float,
    grad: Float[Tensor, "N H"],
    weight_sums: Float[Tensor, "P H"],
    index: Int[Tensor, " N"] | None = None,
    *,
    grad_x: Float[Tensor, "V H"],
    added: Float[Tensor, "N H"] | None = None,
    give_output: bool = True,
) -> None:
    """From the gradient of the norm's output: that of x[index], plus `added`, into grad_x[index].

    The gradient of the weight is added to `weight_sums`, spread over P. `grad` becomes the norm's output, if that is
    asked for: the weight gradient of the product behind the norm needs it, and it need not be kept from the forward.
    `grad_x` may be `x`, whose rows are then replaced.
    """
    rows, wide_grad = _wide(x if index is None else x[index]), _wide(grad)
    scale = _scale(rows, eps)
    normed = rows * scale
    weight_sums[0] += (wide_grad * normed).sum(0)
    weighted = wide_grad * weight
    result = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    grad_x[ALL if index is None else index] = (result if added is None else result + added).to(grad_x.dtype)
    if give_output:
        grad.copy_(normed * weight)


def swiglu(gate_up: Float[Tensor, "N 2I"]) -> Float[Tensor, "N I"]:
    """silu(gate) · up."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def swiglu_backward(gate_up: Float[Tensor, "N 2I"], grad: Float[Tensor, "N I"]) -> None:
    """`gate_up` becomes its gradient; `grad`, the output's gradient, becomes the output, for the next product's."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    wide_grad, sigmoid = _wide(grad), gate.sigmoid()
    output, grad_up = gate * sigmoid * up, wide_grad * gate * sigmoid
    grad_gate = wide_grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    gate_up.copy_(torch.cat([grad_gate, grad_up], dim=-1))
    grad.copy_(output)


def rotate(heads: Float[Tensor, "N heads C"], cos: Float[Tensor, "N C/2"], sin: Float[Tensor, "N C/2"]) -> None:
    """RoPE in place, in the half-split layout of Llama."""
    first, second = _wide(heads).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def join_heads(
    parts: Sequence[Float[Tensor, "N heads C"]],
    cos: Float[Tensor, "N C/2"],
    sin: Float[Tensor, "N C/2"],
    *,
    num_rotated: int,
    total: Float[Tensor, "N W"] | None = None,
    step: int = 0,
) -> Float[Tensor, "N W"]:
    """The gradient of a product from those of its parts, of which the first ones were rotated, by `rotate`.

    Its row i is added to row i + step of `total`, where there is one.
    """
    joined = torch.cat(tuple(parts), dim=1)
    rotate(joined[:, : sum(part.shape[1] for part in parts[:num_rotated])], cos, -sin)
    joined = joined.flatten(1)
    if total is not None:
        total[step:] += joined[: max(len(joined) - step, 0)]
    return joined


def scale_rows(x: Float[Tensor, "N H"], factor: Float[Tensor, ""], kept: Bool[Tensor, " N"] | None = None) -> None:
    """x *= factor in place; rows that are not kept become zero, whatever they hold."""
    x.mul_(factor)
    if kept is not None:
        x.masked_fill_(~kept[:, None], 0)


def quantise(x: Float[Tensor, "N H"]) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N 1"]]:
    """Float8 values and the scale of each row that gives x back: the row's largest becomes float8's largest."""
    largest = _wide(x).abs().amax(-1, keepdim=True).clamp(min=TINY)
    factor = largest.new_tensor(FP8_MAX) / largest  # a number over a tensor is rounded twice, as a reciprocal first
    return (_wide(x) * factor).to(FP8), largest * (1 / FP8_MAX)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scale(rows: Float[Tensor, "N H"], eps: float) -> Float[Tensor, "N 1"]:
    return torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
