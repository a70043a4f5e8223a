"""`PlainLayer` at the speed of its matrix products: same numbers (tests/test_fused_layer.py), written for the GPU.

Plain autograd pays, at each of the K steps, for casts of every weight, a gradient of every weight in bfloat16 that is
cast and added in float32, and passes over memory for norms, RoPE, SwiGLU and residuals. Here

- weights are cast once a training step, q/k/v and gate/up into one matrix each: fewer and larger products;
- products add a weight's gradient to one float32 sum over all steps, and `_HandOut` gives it to autograd once;
- what is cheap is computed again in the backward, in the memory of the gradient that it was made from.

Shapes: T tokens of the pack, N rows of a step, R trained rows, H hidden size, I intermediate size, V target
vocabulary, Q query heads, G key/value heads, C channels.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eagle3.head.draft_head import NUM_CAPTURED_LAYERS, DraftHead, RMSNorm
from eagle3.head.fast.elementwise import PARTIAL_SUMS, choose_kernels
from eagle3.head.fast.products import ALL, Products, add_product, product_dtype, wide_product
from eagle3.head.layer import Projected


class Matrix:
    """The weights of linear maps of one input, one below the other, as products want them; sums their gradients."""

    def __init__(self, linears: list[nn.Linear], dtype: torch.dtype, make_products: type[Products]) -> None:
        self.parameters = [linear.weight for linear in linears]
        weights = [weight.detach() for weight in self.parameters]
        self.heights = [len(weight) for weight in weights]
        self.shape = (sum(self.heights), weights[0].shape[1])
        if len(weights) == 1:
            value = weights[0].to(dtype)
        else:
            value = weights[0].new_empty(self.shape, dtype=dtype)
            torch.cat(weights, out=value)
        products = make_products(value)
        self.forward, self.backward = products.forward, products.backward
        self.wide = torch.promote_types(weights[0].dtype, torch.float32)
        self.total: Tensor | None = None

    def add(self, grad: Float[Tensor, "N out"], x: Float[Tensor, "N in"], rows: slice = ALL) -> None:
        """Add the gradient of these rows of the matrix: `grad` is that of the product, `x` went into it."""
        if self.total is None and rows == ALL:
            self.total = wide_product(grad.T, x, self.wide)
            return
        if self.total is None:
            self.total = grad.new_zeros(self.shape, dtype=self.wide)
        add_product(self.total[rows], grad.T, x)

    def gradients(self) -> list[Tensor | None]:
        if self.total is None:
            return [None] * len(self.parameters)
        parts = self.total.split(self.heights)  # rows: contiguous, so that autograd takes them as they are
        return [part.to(parameter.dtype) for part, parameter in zip(parts, self.parameters, strict=True)]


class Norm:
    """An RMSNorm's weight, and the sums of its gradient."""

    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        self.parameters = [norm.weight]
        self.weight, self.eps = norm.weight.detach(), norm.eps
        self.kernels = choose_kernels(self.weight.device, dtype)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.sums = self.weight.new_zeros((PARTIAL_SUMS, len(self.weight)), dtype=wide)

    def forward(self, x: Tensor, out: Tensor, index: Tensor | None = None) -> Tensor:
        self.kernels.rms_norm(x, self.weight, self.eps, out, index)
        return out

    def backward(self, x: Tensor, grad: Tensor, added: Tensor | None = None) -> Tensor:
        """The gradient of x, with `added` on top; `grad` becomes the norm's output."""
        grad_x = torch.empty_like(x)
        self.kernels.rms_norm_backward(x, self.weight, self.eps, grad, self.sums, grad_x=grad_x, added=added)
        return grad_x

    def backward_of_data(self, x: Tensor, grad: Tensor, index: Tensor | None = None) -> None:
        """The same where x needs no gradient."""
        self.kernels.rms_norm_backward(x, self.weight, self.eps, grad, self.sums, index)

    def gradients(self) -> list[Tensor]:
        return [self.sums.sum(0).to(self.weight.dtype)]


class Weights:
    """All weights of the layer, for one training step."""

    def __init__(
        self, head: DraftHead, embedding: Float[Tensor, "V H"], dtype: torch.dtype, make_products: type[Products]
    ) -> None:
        self.dtype = dtype
        self.embedding, config, layer = embedding, head.config, head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self.kernels = choose_kernels(head.fc.weight.device, dtype)
        # Never in float8: captured layers differ in scale, by more than it covers.
        self.fc = Matrix([head.fc], dtype, Products)
        self.qkv = Matrix([attention.q_proj, attention.k_proj, attention.v_proj], dtype, make_products)
        self.o = Matrix([attention.o_proj], dtype, make_products)
        self.gate_up = Matrix([mlp.gate_proj, mlp.up_proj], dtype, make_products)
        self.down = Matrix([mlp.down_proj], dtype, make_products)
        self.embed_norm, self.hidden_norm = Norm(layer.input_layernorm, dtype), Norm(layer.hidden_norm, dtype)
        self.mlp_norm = Norm(layer.post_attention_layernorm, dtype)
        fc_norms = cast("list[RMSNorm]", list(head.fc_norm) if config.fc_norm else [])
        self.fc_norms = [Norm(norm, dtype) for norm in fc_norms]
        self.output_norms = [Norm(head.norm, dtype)] if config.norm_output else []
        self.all: list[Matrix | Norm] = [
            *(self.fc, self.qkv, self.o, self.gate_up, self.down, self.embed_norm, self.hidden_norm, self.mlp_norm),
            *(*self.fc_norms, *self.output_norms),
        ]
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim

    def parameters(self) -> list[Tensor]:
        return [parameter for each in self.all for parameter in each.parameters]

    def gradients(self) -> list[Tensor | None]:
        return [gradient for each in self.all for gradient in each.gradients()]


class _HandOut(torch.autograd.Function):
    """The parameters' place in the graph: every function below takes its output, `edge`, and gives it no gradient.

    Autograd runs a node's backward when those of all functions that took its output are done, with or without
    gradients from them. So this one runs once, last, and returns the finished sums.
    """

    @staticmethod
    def forward(ctx: Any, weights: Weights, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weights = weights
        return parameters[0].new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        return None, *ctx.weights.gradients()


class _Fuse(torch.autograd.Function):
    """`DraftHead.fuse`; the captured states are data and get no gradient."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, weights: Weights, aux: Float[Tensor, "T 3H"]) -> Float[Tensor, "T H"]:
        ctx.weights = weights
        ctx.save_for_backward(aux)
        x = aux
        if weights.fc_norms:
            x = torch.empty_like(aux, dtype=weights.dtype)
            for norm, part, out in zip(weights.fc_norms, *_thirds(aux, x), strict=True):
                norm.forward(part, out)
        return weights.fc.forward(x.to(weights.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "T H"]) -> tuple[None, ...]:
        (aux,), weights = ctx.saved_tensors, ctx.weights
        x = aux
        if weights.fc_norms:
            x = weights.fc.backward(grad)
            for norm, part, grad_part in zip(weights.fc_norms, *_thirds(aux, x), strict=True):
                norm.backward_of_data(part, grad_part)
        weights.fc.add(grad, x.to(weights.dtype))
        return None, None, None


class _ProjectPack(torch.autograd.Function):
    """Step 0: keys and values of all tokens, hidden states and queries of the trained rows."""

    @staticmethod
    def forward(
        ctx: Any,
        edge: Tensor,
        weights: Weights,
        hidden: Float[Tensor, "T H"],
        tokens: Int[Tensor, " T"],
        cos: Float[Tensor, "T C/2"],
        sin: Float[Tensor, "T C/2"],
        rows: Int[Tensor, " R"],
    ) -> tuple[Tensor, ...]:
        ctx.weights = weights
        ctx.save_for_backward(hidden, tokens, cos, sin, rows)
        x = _normed(weights, hidden, tokens)
        width = weights.num_heads * weights.head_dim
        query = _heads(weights, x.index_select(0, rows), slice(None, width))
        key_value = _heads(weights, x, slice(width, None))
        weights.kernels.rotate(query, cos.index_select(0, rows), sin.index_select(0, rows))
        weights.kernels.rotate(key_value[:, : weights.num_kv_heads], cos, sin)
        return hidden.index_select(0, rows), query, *key_value.chunk(2, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, tokens, cos, sin, rows), weights = ctx.saved_tensors, ctx.weights
        width = weights.num_heads * weights.head_dim
        query = _grad_heads(weights, grads[:1], weights.num_heads, cos.index_select(0, rows), sin.index_select(0, rows))
        key_value = _grad_heads(weights, grads[1:], weights.num_kv_heads, cos, sin)
        x = weights.qkv.backward(key_value, slice(width, None))
        # No row is there twice, so none of the atomic additions that `index_add_` makes.
        x.index_copy_(0, rows, weights.qkv.backward(query, slice(None, width), x.index_select(0, rows)))
        grad_hidden = _normed_backward(weights, hidden, tokens, x, None)
        grad_hidden.index_copy_(0, rows, grad_hidden.index_select(0, rows).add_(grad_rows))
        weights.qkv.add(query, x.index_select(0, rows), slice(None, width))
        weights.qkv.add(key_value, x, slice(width, None))
        return None, None, grad_hidden, None, None, None, None


class _Project(torch.autograd.Function):
    """Later steps, on trained rows alone. Hidden states go through: their gradient is added in the norm's kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        edge: Tensor,
        weights: Weights,
        hidden: Float[Tensor, "R H"],
        tokens: Int[Tensor, " R"],
        cos: Float[Tensor, "R C/2"],
        sin: Float[Tensor, "R C/2"],
    ) -> tuple[Tensor, ...]:
        ctx.weights = weights
        ctx.save_for_backward(hidden, tokens, cos, sin)
        heads = _heads(weights, _normed(weights, hidden, tokens))
        query_key, value = heads.split([weights.num_heads + weights.num_kv_heads, weights.num_kv_heads], dim=1)
        weights.kernels.rotate(query_key, cos, sin)
        return hidden, *query_key.split([weights.num_heads, weights.num_kv_heads], dim=1), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, tokens, cos, sin), weights = ctx.saved_tensors, ctx.weights
        heads = _grad_heads(weights, grads, weights.num_heads + weights.num_kv_heads, cos, sin)
        x = weights.qkv.backward(heads)
        grad_hidden = _normed_backward(weights, hidden, tokens, x, grad_hidden.contiguous())
        weights.qkv.add(heads, x)
        return None, None, grad_hidden, None, None, None


class _Output(torch.autograd.Function):
    """`DraftHead.output`. Residuals are added inside the products."""

    @staticmethod
    def forward(
        ctx: Any, edge: Tensor, weights: Weights, hidden: Float[Tensor, "R H"], attended: Float[Tensor, "R QC"]
    ) -> Float[Tensor, "R H"]:
        middle = weights.o.forward(attended, added=hidden)
        gate_up = weights.gate_up.forward(weights.mlp_norm.forward(middle, torch.empty_like(middle)))
        ctx.weights = weights
        ctx.save_for_backward(attended, middle, gate_up)
        return weights.down.forward(weights.kernels.swiglu(gate_up), added=middle)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "R H"]) -> tuple[Tensor | None, ...]:
        (attended, middle, gate_up), weights = ctx.saved_tensors, ctx.weights
        grad = grad.contiguous()
        activation = weights.down.backward(grad)
        weights.kernels.swiglu_backward(gate_up, activation)  # now gate_up's gradient, and the activation
        weights.down.add(grad, activation)
        del activation
        normed = weights.gate_up.backward(gate_up)
        grad_middle = weights.mlp_norm.backward(middle, normed, added=grad)
        weights.gate_up.add(gate_up, normed)
        weights.o.add(grad_middle, attended)
        return None, None, grad_middle, weights.o.backward(grad_middle)


class _Feedback(torch.autograd.Function):
    """`DraftHead.feedback` through the final norm."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, norm: Norm, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R H"]:
        ctx.norm = norm
        ctx.save_for_backward(hidden)
        return norm.forward(hidden, torch.empty_like(hidden))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "R H"]) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        return None, None, ctx.norm.backward(hidden, grad.clone(memory_format=torch.contiguous_format))


class FusedLayer:
    def __init__(
        self, head: DraftHead, embedding: Float[Tensor, "V H"], make_products: type[Products] = Products
    ) -> None:
        self.rotary = head.rotary
        self.weights = Weights(head, embedding, product_dtype(head.fc.weight), make_products)
        self.edge = _HandOut.apply(self.weights, *self.weights.parameters())

    def fuse(self, aux: Float[Tensor, "T 3H"]) -> Float[Tensor, "T H"]:
        return _Fuse.apply(self.edge, self.weights, aux)

    def project(
        self,
        hidden: Float[Tensor, "N H"],
        tokens: Int[Tensor, " N"],
        positions: Int[Tensor, " N"],
        rows: Int[Tensor, " R"] | None = None,
    ) -> Projected:
        in_float32 = positions.new_empty(0, dtype=torch.float32)
        cos, sin = (part[0, :, : part.shape[-1] // 2] for part in self.rotary(in_float32, positions[None]))
        inputs = (self.edge, self.weights, hidden, tokens, cos, sin)
        hidden, query, key, value = _Project.apply(*inputs) if rows is None else _ProjectPack.apply(*inputs, rows)
        return hidden, query, (key, value)

    def output(self, hidden: Float[Tensor, "R H"], attended: Float[Tensor, "R Q C"]) -> Float[Tensor, "R H"]:
        return _Output.apply(self.edge, self.weights, hidden, attended.flatten(1))

    def feedback(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R H"]:
        for norm in self.weights.output_norms:
            hidden = _Feedback.apply(self.edge, norm, hidden)
        return hidden


def _thirds(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [tensor.chunk(NUM_CAPTURED_LAYERS, dim=-1) for tensor in tensors]


def _normed(weights: Weights, hidden: Tensor, tokens: Tensor) -> Float[Tensor, "N 2H"]:
    """`DraftHead.attention_input`."""
    x = hidden.new_empty(len(hidden), 2 * hidden.shape[1])
    embed_part, hidden_part = x.chunk(2, dim=-1)
    weights.embed_norm.forward(weights.embedding, embed_part, tokens)
    weights.hidden_norm.forward(hidden, hidden_part)
    return x


def _normed_backward(
    weights: Weights, hidden: Tensor, tokens: Tensor, x: Float[Tensor, "N 2H"], added: Tensor | None
) -> Float[Tensor, "N H"]:
    """The gradient of `hidden`, with `added` on top; `x`, the gradient of what `_normed` returned, becomes that."""
    embed_part, hidden_part = x.chunk(2, dim=-1)
    weights.embed_norm.backward_of_data(weights.embedding, embed_part, tokens)
    return weights.hidden_norm.backward(hidden, hidden_part, added)


def _heads(weights: Weights, x: Float[Tensor, "N 2H"], rows: slice = ALL) -> Float[Tensor, "N heads C"]:
    return weights.qkv.forward(x, rows).unflatten(-1, (-1, weights.head_dim))


def _grad_heads(
    weights: Weights, grads: tuple[Tensor, ...], rotated: int, cos: Tensor, sin: Tensor
) -> Float[Tensor, "N W"]:
    """The gradient of a product from those of its heads [N, heads, C], of which the first ones were rotated."""
    heads = torch.cat(grads, dim=1)
    weights.kernels.rotate(heads[:, :rotated], cos, sin, back=True)
    return heads.flatten(1)
