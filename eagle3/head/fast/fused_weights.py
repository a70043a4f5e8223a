"""Weights of `FusedLayer` for one training step: cast once, their gradients summed over all steps of the unroll.

Shapes: fast/__init__.py; O output and I input size of a matrix, Y some of its O rows.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from eagle3.head.draft_head import DraftHead
from eagle3.head.fast.elementwise import PARTIAL_SUMS, Elementwise
from eagle3.head.fast.products import ALL, MakeProducts, Products, add_product, wide_product
from eagle3.head.head import RMSNorm

EMBED, HIDDEN = 0, 1  # the two inputs of attention, next to each other in its weights


class Matrix:
    """Weights of linear layers that share an input, stacked into one matrix; sums their gradients.

    With `parts` > 1 the input is that many tensors of the same width, and each `part` is multiplied separately.
    """

    def __init__(
        self, linears: list[nn.Linear], dtype: torch.dtype, make_products: MakeProducts, parts: int = 1
    ) -> None:
        self.parameters = [linear.weight for linear in linears]
        weights = [weight.detach() for weight in self.parameters]
        self.heights = [len(weight) for weight in weights]
        self.shape = (sum(self.heights), weights[0].shape[1])  # (O, I)
        if len(weights) == 1:
            value = weights[0].to(dtype)
        else:
            value = weights[0].new_empty(self.shape, dtype=dtype)
            torch.cat(weights, out=value)
        self.num_parts = parts
        self.products = [make_products(part) for part in value.chunk(parts, dim=1)]
        self.wide = torch.promote_types(weights[0].dtype, torch.float32)
        self.total: Tensor | None = None  # (O, I), the gradient so far

    def forward(
        self, x: Float[Tensor, "N _"], rows: slice = ALL, added: Float[Tensor, "N Y"] | None = None, part: int = 0
    ) -> Float[Tensor, "N Y"]:
        return self.products[part].forward(x, rows, added)

    def backward(
        self, grad: Float[Tensor, "N Y"], rows: slice = ALL, added: Float[Tensor, "N _"] | None = None, part: int = 0
    ) -> Float[Tensor, "N _"]:
        return self.products[part].backward(grad, rows, added)

    def add(self, grad: Float[Tensor, "N Y"], x: Float[Tensor, "N I"], rows: slice = ALL, part: int = 0) -> None:
        """Add to the gradient of these rows; `grad` is the gradient of the product, `x` its input."""
        if self.total is None and rows == ALL and self.num_parts == 1:
            self.total = wide_product(grad.T, x, self.wide)
            return
        if self.total is None:
            self.total = grad.new_zeros(self.shape, dtype=self.wide)
        add_product(self.total.chunk(self.num_parts, dim=1)[part][rows], grad.T, x)

    def share_gradient(self, norms: Sequence["Norm"], part: int = 0) -> None:
        """Split `total`, which was summed over norms' outputs without their weights, into both gradients.

        matrix @ (weight · normed) is (matrix · weight) @ normed, and `total` is the gradient of the bracket. It gives
        the gradients of both factors: one pass over the matrix instead of a product as large as the forward's.
        """
        if not norms:
            return
        assert self.total is not None
        for parameter, total in zip(self.parameters, self.total.split(self.heights), strict=True):
            matrices = (
                each.chunk(self.num_parts, dim=1)[part].chunk(len(norms), dim=1) for each in (parameter.detach(), total)
            )
            for norm, matrix, of_product in zip(norms, *matrices, strict=True):
                norm.sums[0] += (of_product * matrix).sum(0)
                of_product *= norm.weight

    def free(self) -> None:
        """Free the cast weights after the last product; gradients are still summed."""
        self.products.clear()

    def gradients(self) -> list[Tensor | None]:
        if self.total is None:
            return [None] * len(self.parameters)
        parts = self.total.split(self.heights)  # rows: contiguous, so that autograd takes them as they are
        return [part.to(parameter.dtype) for part, parameter in zip(parts, self.parameters, strict=True)]


class Norm:
    """Weight of an RMSNorm, and the partial sums of its gradient."""

    def __init__(self, norm: RMSNorm, elementwise: Elementwise) -> None:
        self.parameters = [norm.weight]
        self.weight, self.eps = norm.weight.detach(), norm.eps
        self.elementwise = elementwise
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.sums = self.weight.new_zeros((PARTIAL_SUMS, len(self.weight)), dtype=wide)  # (X, H)

    def forward(self, x: Tensor, out: Tensor, index: Tensor | None = None, weighted: bool = True) -> Tensor:
        self.elementwise.rms_norm(x, self.weight if weighted else None, self.eps, out, index)
        return out

    def backward(
        self,
        x: Float[Tensor, "N H"],
        grad_output: Float[Tensor, "N H"],
        added: Float[Tensor, "N H"] | None = None,
        give_output: bool = True,
    ) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
        """Return the gradient of x, with `added` on top, and the norm's output, in the memory of `grad_output`."""
        grad_x = torch.empty_like(x)
        output = self.elementwise.rms_norm_backward(
            x, self.weight, self.eps, grad_output, self.sums, grad_x=grad_x, added=added, give_output=give_output
        )
        return grad_x, output

    def gradients(self) -> list[Tensor]:
        return [self.sums.sum(0).to(self.weight.dtype)]


class Group:
    """Weights whose gradients are complete at the same time: after the backward of the first node that uses them.

    Only that node gets the parameters as arguments, and hands their gradients to autograd. Each step reads the output
    of the step before, so backwards run from the last step to the first. The sums are complete by then, and ranks can
    reduce them while the rest is computed.
    """

    def __init__(self, *members: Matrix | Norm) -> None:
        self.members = members

    def parameters(self) -> list[Tensor]:
        return [parameter for each in self.members for parameter in each.parameters]

    def gradients(self) -> list[Tensor | None]:
        return [gradient for each in self.members for gradient in each.gradients()]


class EmbedPart:
    """The embeddings' part of queries, keys and values at all anchors, and its gradient from later steps.

    Step 0 computes it. Anchors of a turn are consecutive, so anchor i takes at step k the token that anchor i + k takes
    at step 0. With anchors 0, 1, 2 of one turn and 3, 4 of another, they read these rows:

        step 0    0 1 2  3 4
        step 1    1 2 3  4 -    - is zeros; anchors 2 and 4 end their turns, so that step 1 does not train them
    """

    value: Float[Tensor, "R W"]
    total: Float[Tensor, "R W"] | None = None  # the gradient so far

    def at(self, step: int) -> Float[Tensor, "R W"]:
        return functional.pad(self.value[step:], (0, 0, 0, min(step, len(self.value))))


class Weights:
    """Everything that the nodes of one training step share. Each part sums its own gradient over the steps."""

    def __init__(
        self,
        head: DraftHead,
        embedding: Float[Tensor, "V H"],
        dtype: torch.dtype,
        elementwise: Elementwise,
        make_products: MakeProducts,
    ) -> None:
        self.dtype, self.elementwise = dtype, elementwise
        self.embedding, config, layer = embedding, head.config, head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        # Never in float8: captured layers differ in scale, by more than it covers.
        self.fc = Matrix([head.fc], dtype, Products)
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = Matrix(qkv, dtype, make_products, parts=2)  # W rows, of inputs EMBED and HIDDEN
        self.o = Matrix([attention.o_proj], dtype, make_products)
        self.gate_up = Matrix([mlp.gate_proj, mlp.up_proj], dtype, make_products)
        self.down = Matrix([mlp.down_proj], dtype, make_products)
        self.embed_norm, self.hidden_norm = (
            Norm(norm, elementwise) for norm in (layer.input_layernorm, layer.hidden_norm)
        )
        self.mlp_norm = Norm(layer.post_attention_layernorm, elementwise)
        self.aux_norms = [Norm(norm, elementwise) for norm in head.norms_of_aux()]
        self.output_norms = [Norm(head.norm, elementwise)] if config.norm_output else []
        self.of_fuse = Group(self.fc, *self.aux_norms)
        self.of_attention = Group(self.qkv, self.embed_norm, self.hidden_norm)
        self.of_output = Group(self.o, self.gate_up, self.down, self.mlp_norm)
        self.of_feedback = Group(*self.output_norms)
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = self.num_heads * self.head_dim
        self.query_rows, self.key_value_rows = slice(None, width), slice(width, None)  # of `qkv`
        self.embed_part = EmbedPart()
