"""The matrix products of a training step, in bf16 under autocast or in float8.

Shapes: fast/__init__.py; O output and I input size of a weight, Y some of its O rows.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.head.fast.elementwise import ALL, Elementwise

# From 2.10 on, PyTorch returns a GPU's float32 sums of half-precision factors; earlier, factors are cast first.
KEEPS_SUMS = torch.__version__ >= "2.10"


class Products:
    """The products with one weight [O, I], in its dtype."""

    def __init__(self, weight: Float[Tensor, "O I"]) -> None:
        self.weight = weight

    def forward(
        self, x: Float[Tensor, "N I"], rows: slice = ALL, added: Float[Tensor, "N Y"] | None = None
    ) -> Float[Tensor, "N Y"]:
        """Return x @ weight[rows].T plus `added`, in the memory of `added`."""
        weight = self.weight[rows].T
        return x @ weight if added is None else torch.addmm(added, x, weight, out=added)

    def backward(
        self, grad: Float[Tensor, "N Y"], rows: slice = ALL, added: Float[Tensor, "N I"] | None = None
    ) -> Float[Tensor, "N I"]:
        """Return the gradient of the input of `forward` plus `added`, in the memory of `added`."""
        weight = self.weight[rows]
        return grad @ weight if added is None else torch.addmm(added, grad, weight, out=added)


MakeProducts = Callable[[Tensor], Products]  # from a weight [O, I], once per training step


class Float8Products(Products):
    """Products of factors in float8 (e4m3), with a scale for every row of the left and every column of the right one.

    Gradients are e4m3 too: e5m2 trades a bit of precision for range, which a row with its own scale does not need, and
    the error would double (tests/head/fast/test_products.py). The weight is rounded once per training step for each of
    the two products: they sum over different dimensions, and a scale must be constant along the summed dimension.

    The gradient of the weight, a third of the work, stays in bf16 with float32 sums (`add_product`). It sums over rows,
    which differ in scale, so that the scales cannot be factored out; and both factors would have to be transposed.

    On the CPU the rounding is the same, and the products are in float32.
    """

    def __init__(self, weight: Float[Tensor, "O I"], *, elementwise: Elementwise) -> None:
        self.dtype, self.elementwise = weight.dtype, elementwise
        self.weight, self.scale = elementwise.quantise(weight)
        if torch.is_grad_enabled():
            self.transposed, self.transposed_scale = elementwise.quantise(weight.T.contiguous())  # (I, O), (I, 1)

    def forward(
        self, x: Float[Tensor, "N I"], rows: slice = ALL, added: Float[Tensor, "N Y"] | None = None
    ) -> Float[Tensor, "N Y"]:
        return self._product(x, self.weight[rows], self.scale[rows], added)

    def backward(
        self, grad: Float[Tensor, "N Y"], rows: slice = ALL, added: Float[Tensor, "N I"] | None = None
    ) -> Float[Tensor, "N I"]:
        return self._product(grad, self.transposed[:, rows], self.transposed_scale, added)

    def _product(
        self,
        left: Float[Tensor, "N I"],
        right: Float[Tensor, "Y I"],
        right_scale: Float[Tensor, "Y 1"],
        added: Float[Tensor, "N Y"] | None,
    ) -> Float[Tensor, "N Y"]:
        """Return left @ right.T + added; `right` is already rounded."""
        values, scale = self.elementwise.quantise(left)
        if left.is_cuda:
            # Any number of rows; the other sizes are multiples of 16. PyTorch takes cuBLAS where that is 12.9 or newer
            # on Hopper, else CUTLASS, whose kernel for rows' scales is slow without fast accumulation.
            product = torch._scaled_mm(values, right.T, scale, right_scale.T, out_dtype=self.dtype, use_fast_accum=True)
        else:
            product = (wide_product(values, right.T, scale.dtype) * scale * right_scale.T).to(self.dtype)
        return product if added is None else added.add_(product)


def float8_obstacle(device: torch.device, precision: str, sizes: dict[str, int]) -> str | None:
    """Return why this run cannot multiply in float8; None if it can, as always on the CPU.

    `precision` is the trainer's; `sizes` are those of all weights, by name.
    """
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (8, 9):
        return f"needs a GPU of compute capability 8.9 or more, this is a {torch.cuda.get_device_name(device)}"
    if not precision.startswith("bf16"):
        return f"is for trainer.precision=bf16-mixed, here trainer.precision={precision}"
    for name, size in sizes.items():
        if size % 16:
            return f"needs sizes that are multiples of 16, here {name} is {size}"
    return None


def wide_product(left: Float[Tensor, "N I"], right: Float[Tensor, "I Y"], dtype: torch.dtype) -> Float[Tensor, "N Y"]:
    """Return left @ right in `dtype`, even if the factors are in half precision."""
    if left.is_cuda and KEEPS_SUMS:
        return torch.mm(left, right, out_dtype=dtype)
    # With `out`, autocast leaves the product as it is.
    return torch.mm(left.to(dtype), right.to(dtype), out=left.new_empty((len(left), right.shape[1]), dtype=dtype))


def add_product(total: Float[Tensor, "O I"], left: Float[Tensor, "O N"], right: Float[Tensor, "N I"]) -> None:
    """Add left @ right to `total`, summed in the dtype of `total`."""
    if total.is_cuda and KEEPS_SUMS:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of autocast if it is on, else that of the weight."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
