"""`PlainLayer` at the speed of its matrix products: same numbers (tests/head/fast/test_fused_layer.py), for the GPU.

Plain autograd pays, at each of the K steps, for casts of every weight, a gradient of every weight in bfloat16 that is
cast and added in float32, and passes over memory for norms, RoPE, SwiGLU and residuals. Here

- weights are cast once a training step, q/k/v and gate/up into one matrix each: fewer and larger products;
- products add a weight's gradient to one float32 sum over all steps, which autograd gets once, as soon as it is whole;
- what is cheap is computed again in the backward, in the memory of the gradient that it was made from;
- what the embeddings give to queries, keys and values, half of those products, is computed once for all steps: rows of
  a turn are neighbours, so that row i takes at step k the token that row i + k takes at step 0. (Past the end of a turn
  that is another turn's token, in rows that the step does not train.)

Shapes: T tokens of the pack, N rows of a step, R trained rows, H hidden size, I intermediate size, V target
vocabulary, Q query heads, G key/value heads, C channels.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from eagle3.head.draft_head import DraftHead
from eagle3.head.fast.fused_weights import Norm, Weights
from eagle3.head.fast.products import Products, product_dtype
from eagle3.head.layer import Projected


class _Fuse(torch.autograd.Function):
    """`DraftHead.fuse`; the captured states are data and get no gradient."""

    @staticmethod
    def forward(ctx: Any, weights: Weights, aux: Float[Tensor, "T 3H"], *parameters: Tensor) -> Float[Tensor, "T H"]:
        ctx.weights = weights
        ctx.save_for_backward(aux)
        x = aux
        if weights.fc_norms:
            x = torch.empty_like(aux, dtype=weights.dtype)
            for norm, part, out in zip(weights.fc_norms, *_by_layer(weights, aux, x), strict=True):
                norm.forward(part, out)
        hidden = weights.fc.forward(x.to(weights.dtype))
        weights.fc.forget()  # what goes into it is data, or norms of data: nothing is multiplied back
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "T H"]) -> tuple[Tensor | None, ...]:
        (aux,), weights = ctx.saved_tensors, ctx.weights
        x = aux
        if weights.fc_norms:
            x = torch.empty_like(aux, dtype=weights.dtype)
            for norm, part, out in zip(weights.fc_norms, *_by_layer(weights, aux, x), strict=True):
                norm.forward(part, out, weighted=False)
        weights.fc.add(grad, x.to(weights.dtype))
        weights.fc.share_gradient(weights.fc_norms)
        return None, None, *weights.of_fuse.gradients()


class _ProjectPack(torch.autograd.Function):
    """Step 0: keys and values of all tokens, hidden states and queries of the trained rows.

    Leaves `weights.embed_part` for the later steps; their backward runs first and leaves `weights.grad_embed_part`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Weights,
        hidden: Float[Tensor, "T H"],
        tokens: Int[Tensor, " T"],
        cos: Float[Tensor, "T C/2"],
        sin: Float[Tensor, "T C/2"],
        rows: Int[Tensor, " R"],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.weights = weights
        ctx.save_for_backward(hidden, tokens, cos, sin, rows)
        embed = weights.embed_norm.forward(weights.embedding, torch.empty_like(hidden), tokens)
        normed = weights.hidden_norm.forward(hidden, torch.empty_like(hidden))
        of_query, of_key_value = _split(weights)
        query = weights.of_embed.forward(embed.index_select(0, rows), of_query)
        key_value = weights.of_embed.forward(embed, of_key_value)
        weights.embed_part = torch.cat([query, key_value.index_select(0, rows)], dim=1)
        query = _heads(weights, weights.of_hidden.forward(normed.index_select(0, rows), of_query, added=query))
        key_value = _heads(weights, weights.of_hidden.forward(normed, of_key_value, added=key_value))
        weights.kernels.rotate(query, cos.index_select(0, rows), sin.index_select(0, rows))
        weights.kernels.rotate(key_value[:, : weights.num_kv_heads], cos, sin)
        return hidden.index_select(0, rows), query, *key_value.chunk(2, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, tokens, cos, sin, rows), weights = ctx.saved_tensors, ctx.weights
        angles = cos.index_select(0, rows), sin.index_select(0, rows)
        query = weights.kernels.join_heads(grads[:1], *angles, num_rotated=1)
        key_value = weights.kernels.join_heads(grads[1:], cos, sin, num_rotated=1)
        of_query, of_key_value = _split(weights)
        x = weights.of_hidden.backward(key_value, of_key_value)
        # No row is there twice, so none of the atomic additions that `index_add_` makes.
        x.index_copy_(0, rows, weights.of_hidden.backward(query, of_query, x.index_select(0, rows)))
        grad_hidden = weights.hidden_norm.backward(hidden, x)
        grad_hidden.index_copy_(0, rows, grad_hidden.index_select(0, rows).add_(grad_rows))
        _add_of_pack(weights, query, key_value, x, rows, part=1)
        del x  # before another one of its size is there too: where most tokens are prompts, memory is highest here
        if weights.grad_embed_part is not None:
            later_query, later_key_value = weights.grad_embed_part.split([query.shape[1], key_value.shape[1]], dim=1)
            query.add_(later_query)
            key_value.index_copy_(0, rows, (later_key_value + key_value.index_select(0, rows)).to(key_value.dtype))
        embed = weights.embed_norm.forward(weights.embedding, torch.empty_like(hidden), tokens, weighted=False)
        _add_of_pack(weights, query, key_value, embed, rows, part=0)
        weights.qkv.share_gradient([weights.embed_norm], part=0)
        return None, grad_hidden, None, None, None, None, *weights.of_attention.gradients()


class _Project(torch.autograd.Function):
    """Later steps, on trained rows alone. Hidden states go through: their gradient is added in the norm's kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Weights,
        hidden: Float[Tensor, "R H"],
        step: int,
        cos: Float[Tensor, "R C/2"],
        sin: Float[Tensor, "R C/2"],
    ) -> tuple[Tensor, ...]:
        assert weights.embed_part is not None
        ctx.weights, ctx.step = weights, step
        ctx.save_for_backward(hidden, cos, sin)
        normed = weights.hidden_norm.forward(hidden, torch.empty_like(hidden))
        # The last rows of the pack take nothing: they end a turn, so that the step does not train them.
        of_embed = functional.pad(weights.embed_part[step:], (0, 0, 0, min(step, len(hidden))))
        heads = _heads(weights, weights.of_hidden.forward(normed, added=of_embed))
        query_key, value = heads.split([weights.num_heads + weights.num_kv_heads, weights.num_kv_heads], dim=1)
        weights.kernels.rotate(query_key, cos, sin)
        return hidden, *query_key.split([weights.num_heads, weights.num_kv_heads], dim=1), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, cos, sin), weights = ctx.saved_tensors, ctx.weights
        if weights.grad_embed_part is None:
            weights.grad_embed_part = torch.zeros_like(weights.embed_part, dtype=weights.qkv.wide)
        heads = weights.kernels.join_heads(grads, cos, sin, num_rotated=2, total=weights.grad_embed_part, step=ctx.step)
        x = weights.of_hidden.backward(heads)
        grad_hidden = weights.hidden_norm.backward(hidden, x, grad_hidden.contiguous())
        weights.qkv.add(heads, x, part=1)
        return None, grad_hidden, None, None, None


class _Output(torch.autograd.Function):
    """`DraftHead.output`. Residuals are added inside the products."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Weights,
        hidden: Float[Tensor, "R H"],
        attended: Float[Tensor, "R QC"],
        *parameters: Tensor,
    ) -> Float[Tensor, "R H"]:
        middle = weights.o.forward(attended, added=hidden.clone())
        gate_up = weights.gate_up.forward(weights.mlp_norm.forward(middle, torch.empty_like(middle)))
        ctx.weights, ctx.first = weights, bool(parameters)
        ctx.save_for_backward(attended, middle, gate_up)
        return weights.down.forward(weights.kernels.swiglu(gate_up), added=middle.clone())

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
        gradients = weights.of_output.gradients() if ctx.first else []
        return None, grad_middle, weights.o.backward(grad_middle), *gradients


class _Feedback(torch.autograd.Function):
    """`DraftHead.feedback` through the final norm."""

    @staticmethod
    def forward(ctx: Any, norm: Norm, hidden: Float[Tensor, "R H"], *parameters: Tensor) -> Float[Tensor, "R H"]:
        ctx.norm, ctx.first = norm, bool(parameters)
        ctx.save_for_backward(hidden)
        return norm.forward(hidden, torch.empty_like(hidden))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "R H"]) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        grad_hidden = ctx.norm.backward(hidden, grad.contiguous(), give_output=False)
        return None, grad_hidden, *(ctx.norm.gradients() if ctx.first else [])


class FusedLayer:
    def __init__(
        self, head: DraftHead, embedding: Float[Tensor, "V H"], make_products: type[Products] = Products
    ) -> None:
        self.rotary = head.rotary
        self.weights = Weights(head, embedding, product_dtype(head.fc.weight), make_products)

    def fuse(self, aux: Float[Tensor, "T 3H"]) -> Float[Tensor, "T H"]:
        return _Fuse.apply(self.weights, aux, *self.weights.of_fuse.take())

    def project_context(
        self,
        hidden: Float[Tensor, "T H"],
        tokens: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        rows: Int[Tensor, " R"],
    ) -> Projected:
        inputs = (self.weights, hidden, tokens, *self._angles(positions), rows)
        hidden, query, key, value = _ProjectPack.apply(*inputs, *self.weights.of_attention.take())
        return hidden, query, (key, value)

    def project_step(
        self, hidden: Float[Tensor, "R H"], tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"], step: int
    ) -> Projected:
        """`tokens` are those of step 0, `step` rows on."""
        hidden, query, key, value = _Project.apply(self.weights, hidden, step, *self._angles(positions))
        return hidden, query, (key, value)

    def output(self, hidden: Float[Tensor, "R H"], attended: Float[Tensor, "R Q C"]) -> Float[Tensor, "R H"]:
        return _Output.apply(self.weights, hidden, attended.flatten(1), *self.weights.of_output.take())

    def feedback(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R H"]:
        for norm in self.weights.output_norms:
            hidden = _Feedback.apply(norm, hidden, *self.weights.of_feedback.take())
        return hidden

    def _angles(self, positions: Int[Tensor, " N"]) -> list[Float[Tensor, "N C/2"]]:
        in_float32 = positions.new_empty(0, dtype=torch.float32)
        return [part[0, :, : part.shape[-1] // 2] for part in self.rotary(in_float32, positions[None])]


def _by_layer(weights: Weights, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [tensor.chunk(len(weights.fc_norms), dim=-1) for tensor in tensors]


def _split(weights: Weights) -> tuple[slice, slice]:
    """Rows of the matrix that make queries, and those that make keys and values."""
    width = weights.num_heads * weights.head_dim
    return slice(None, width), slice(width, None)


def _heads(weights: Weights, product: Float[Tensor, "N W"]) -> Float[Tensor, "N heads C"]:
    return product.unflatten(-1, (-1, weights.head_dim))


def _add_of_pack(weights: Weights, query: Tensor, key_value: Tensor, x: Tensor, rows: Tensor, part: int) -> None:
    """Step 0's part of the gradient of the weights; `x` is what they were multiplied with."""
    of_query, of_key_value = _split(weights)
    weights.qkv.add(query, x.index_select(0, rows), of_query, part)
    weights.qkv.add(key_value, x, of_key_value, part)
