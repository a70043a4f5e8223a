"""Row-wise and element-wise operations of `FusedLayer` and `ChunkedLoss` between products.

Each writes to a given tensor, or over one that is no longer needed, so that a kernel passes over memory once. In plain
autograd, casts, gathers and concatenations are separate passes. Shapes: fast/__init__.py.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
TINY = 1e-30  # lower bound of a row's maximum: a row of zeros stays zero, and gradients are far above it
ALL = slice(None)
PARTIAL_SUMS = 264  # X: two programs for each of an H200's 132 multiprocessors, each with a sum of its own


class Elementwise:
    """The reference, in plain PyTorch, in float32 or wider. `TritonElementwise` overrides every method on a GPU."""

    def rms_norm(
        self,
        x: Float[Tensor, "rows H"],
        weight: Float[Tensor, " H"] | None,
        eps: float,
        out: Float[Tensor, "N H"],
        index: Int[Tensor, " N"] | None = None,
    ) -> None:
        """Write x / √(mean(x²) + eps) · weight (RMSNorm, arXiv:1910.07467) into `out`; `index` picks rows of x."""
        rows = _wide(x if index is None else x[index])  # (N, H)
        normed = rows * _inverse_root(rows, eps)
        out.copy_(normed if weight is None else normed * weight)

    def rms_norm_backward(
        self,
        x: Float[Tensor, "rows H"],
        weight: Float[Tensor, " H"],
        eps: float,
        grad_output: Float[Tensor, "N H"],
        weight_sums: Float[Tensor, "X H"],
        index: Int[Tensor, " N"] | None = None,
        *,
        grad_x: Float[Tensor, "rows H"],
        added: Float[Tensor, "N H"] | None = None,
        give_output: bool = True,
    ) -> Float[Tensor, "N H"]:
        """Write the gradient of x[index], plus `added`, into grad_x[index].

        With n = x / √(mean(x²) + eps) and g = grad_output · weight it is (g - n · mean(g · n)) / √(mean(x²) + eps).
        The gradient of the weight, the sum of grad_output · n over rows, is added to `weight_sums`, spread over X.
        `grad_x` may be `x`, whose rows are then replaced.

        Return the norm's output in `grad_output`'s memory, for the gradient of the weight after the norm, so that it
        need not be kept from the forward. With give_output=False that memory is left undefined.
        """
        rows, wide_grad = _wide(x if index is None else x[index]), _wide(grad_output)  # (N, H)
        scale = _inverse_root(rows, eps)  # (N, 1)
        normed = rows * scale
        weight_sums[0] += (wide_grad * normed).sum(0)
        grad_normed = wide_grad * weight
        grad_rows = scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
        grad_x[ALL if index is None else index] = (grad_rows if added is None else grad_rows + added).to(grad_x.dtype)
        if give_output:
            grad_output.copy_(normed * weight)
        return grad_output

    def swiglu(self, gate_up: Float[Tensor, "N FF"]) -> Float[Tensor, "N F"]:
        """Return silu(gate) · up, silu(x) = x · sigmoid(x) (SwiGLU, arXiv:2002.05202)."""
        gate, up = _wide(gate_up).chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(gate_up.dtype)

    def swiglu_backward(
        self, gate_up: Float[Tensor, "N FF"], grad_activation: Float[Tensor, "N F"]
    ) -> tuple[Float[Tensor, "N FF"], Float[Tensor, "N F"]]:
        """Return the gradient, in the memory of `gate_up`, and the activation, in that of `grad_activation`.

        With s = sigmoid(gate) that of up is grad · gate · s, that of gate is grad · up · s · (1 + gate · (1 - s)).
        """
        gate, up = _wide(gate_up).chunk(2, dim=-1)  # (N, F)
        grad, sigmoid = _wide(grad_activation), gate.sigmoid()
        activation, grad_up = gate * sigmoid * up, grad * gate * sigmoid
        grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return gate_up.copy_(torch.cat([grad_gate, grad_up], dim=-1)), grad_activation.copy_(activation)

    def rotate(self, heads: Float[Tensor, "N heads C"], cos: Float[Tensor, "N E"], sin: Float[Tensor, "N E"]) -> None:
        """Rotate in place (RoPE, arXiv:2104.09864) in the layout of Llama: channel i turns with channel i + C/2."""
        first, second = _wide(heads).chunk(2, dim=-1)  # (N, heads, E)
        cos, sin = cos[:, None], sin[:, None]
        heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))

    def join_heads(
        self,
        parts: Sequence[Float[Tensor, "N _ C"]],
        cos: Float[Tensor, "N E"],
        sin: Float[Tensor, "N E"],
        *,
        num_rotated: int,
        total: Float[Tensor, "N _"] | None = None,
        step: int = 0,
    ) -> Float[Tensor, "N _"]:
        """Return the gradient of a product from those of its parts, of which `rotate` had rotated the first ones.

        Row i is also added to row i + step of `total`, if that exists.
        """
        joined = torch.cat(tuple(parts), dim=1)
        self.rotate(joined[:, : sum(part.shape[1] for part in parts[:num_rotated])], cos, -sin)
        joined = joined.flatten(1)
        if total is not None:
            total[step:] += joined[: max(len(joined) - step, 0)]
        return joined

    def scale_rows(self, x: Float[Tensor, "N H"], factor: Float[Tensor, ""], kept: Bool[Tensor, " N"] | None) -> None:
        """Multiply x by `factor` in place; rows that are not kept become zero, even if they are infinite."""
        x.mul_(factor)
        if kept is not None:
            x.masked_fill_(~kept[:, None], 0)

    def quantise(self, x: Float[Tensor, "N H"]) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N 1"]]:
        """Return float8 values, and the scale of each row that gives x back: its largest becomes float8's largest."""
        largest = _wide(x).abs().amax(-1, keepdim=True).clamp(min=TINY)  # (N, 1)
        factor = largest.new_tensor(FP8_MAX) / largest  # a number over a tensor is rounded twice, as a reciprocal first
        return (_wide(x) * factor).to(FP8), largest * (1 / FP8_MAX)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse_root(rows: Float[Tensor, "N H"], eps: float) -> Float[Tensor, "N 1"]:
    return torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
