"""`PlainLayer` at the speed of its matrix products: same numbers (tests/head/fast/test_fused_layer.py), for the GPU.

Plain autograd pays, at each of the K steps, for casts of every weight, a gradient of every weight in bfloat16 that is
cast and added in float32, and passes over memory for norms, RoPE, SwiGLU and residuals. Here

- weights are cast once a training step, q/k/v and gate/up into one matrix each: fewer and larger products;
- products add a weight's gradient to one float32 sum over all steps, which autograd gets once, as soon as it is whole;
- what is cheap is computed again in the backward, in the memory of the gradient that it was made from;
- what the embeddings give to queries, keys and values, half of those products, is computed once for all steps: anchors
  of a turn are neighbours, so that anchor i takes at step k the token that anchor i + k takes at step 0. (Past the end
  of a turn that is another turn's token, at anchors that the step does not train.)

Each node of autograd is a part of `DraftHead`, whose equations those of elementwise.py are. Shapes: fast/__init__.py.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from eagle3.head.draft_head import DraftHead
from eagle3.head.fast.elementwise import ElementwiseKernels
from eagle3.head.fast.fused_weights import Weights
from eagle3.head.fast.products import MakeProducts, product_dtype
from eagle3.head.layer import Projected


class _Fuse(torch.autograd.Function):
    """`DraftHead.fuse`; the captured states are data and get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, weights: Weights, aux_hidden_states: Float[Tensor, "T AH"], *parameters: Tensor
    ) -> Float[Tensor, "T H"]:
        ctx.weights = weights
        ctx.save_for_backward(aux_hidden_states)
        hidden = weights.fc.forward(_normed_aux(weights, aux_hidden_states))
        weights.fc.forget()  # what goes into it is data, or norms of data: nothing is multiplied back
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "T H"]) -> tuple[Tensor | None, ...]:
        (aux_hidden_states,), weights = ctx.saved_tensors, ctx.weights
        weights.fc.add(grad, _normed_aux(weights, aux_hidden_states, weighted=False))
        weights.fc.share_gradient(weights.aux_norms)
        return None, None, *weights.of_fuse.gradients()


class _ProjectPack(torch.autograd.Function):
    """Step 0: keys and values of all tokens, hidden states and queries of the anchors.

    Leaves `weights.embed_part` for the later steps; their backward runs first and leaves `weights.grad_embed_part`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Weights,
        hidden: Float[Tensor, "T H"],
        tokens: Int[Tensor, " T"],
        cos: Float[Tensor, "T E"],
        sin: Float[Tensor, "T E"],
        anchors: Int[Tensor, " R"],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.weights = weights
        ctx.save_for_backward(hidden, tokens, cos, sin, anchors)
        embed = weights.embed_norm.forward(weights.embedding, torch.empty_like(hidden), tokens)
        normed = weights.hidden_norm.forward(hidden, torch.empty_like(hidden))
        of_query, of_key_value = _split(weights)
        query = weights.of_embed.forward(embed.index_select(0, anchors), of_query)  # (R, QC)
        key_value = weights.of_embed.forward(embed, of_key_value)  # (T, 2 · G · C)
        weights.embed_part = torch.cat([query, key_value.index_select(0, anchors)], dim=1)  # (R, W)
        query = _heads(weights, weights.of_hidden.forward(normed.index_select(0, anchors), of_query, added=query))
        key_value = _heads(weights, weights.of_hidden.forward(normed, of_key_value, added=key_value))
        weights.elementwise.rotate(query, cos.index_select(0, anchors), sin.index_select(0, anchors))
        weights.elementwise.rotate(key_value[:, : weights.num_kv_heads], cos, sin)
        return hidden.index_select(0, anchors), query, *key_value.chunk(2, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_anchors: Float[Tensor, "R H"], *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, tokens, cos, sin, anchors), weights = ctx.saved_tensors, ctx.weights
        angles = cos.index_select(0, anchors), sin.index_select(0, anchors)
        grad_query = weights.elementwise.join_heads(grads[:1], *angles, num_rotated=1)  # (R, QC)
        grad_key_value = weights.elementwise.join_heads(grads[1:], cos, sin, num_rotated=1)  # (T, 2 · G · C)
        of_query, of_key_value = _split(weights)
        grad_normed = weights.of_hidden.backward(grad_key_value, of_key_value)  # (T, H)
        # No row is there twice, so none of the atomic additions that `index_add_` makes.
        grad_normed.index_copy_(
            0, anchors, weights.of_hidden.backward(grad_query, of_query, grad_normed.index_select(0, anchors))
        )
        grad_hidden, normed = weights.hidden_norm.backward(hidden, grad_normed)
        grad_hidden.index_copy_(0, anchors, grad_hidden.index_select(0, anchors).add_(grad_anchors))
        _add_of_pack(weights, grad_query, grad_key_value, normed, anchors, part=1)
        # Before another one of this size is there too: where most tokens are prompts, memory is highest here.
        del grad_normed, normed
        if weights.grad_embed_part is not None:
            sizes = [grad_query.shape[1], grad_key_value.shape[1]]
            later_query, later_key_value = weights.grad_embed_part.split(sizes, dim=1)
            grad_query.add_(later_query)
            grad_key_value.index_copy_(
                0, anchors, (later_key_value + grad_key_value.index_select(0, anchors)).to(grad_key_value.dtype)
            )
        embed = weights.embed_norm.forward(weights.embedding, torch.empty_like(hidden), tokens, weighted=False)
        _add_of_pack(weights, grad_query, grad_key_value, embed, anchors, part=0)
        weights.qkv.share_gradient([weights.embed_norm], part=0)
        return None, grad_hidden, None, None, None, None, *weights.of_attention.gradients()


class _Project(torch.autograd.Function):
    """Later steps, at the anchors alone, with `DraftHead.feedback` before them, whose result is not kept.

    The hidden state goes through: its gradient is added in the norm's kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Weights,
        output: Float[Tensor, "R H"],
        step: int,
        cos: Float[Tensor, "R E"],
        sin: Float[Tensor, "R E"],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        assert weights.embed_part is not None
        ctx.weights, ctx.step, ctx.first = weights, step, bool(parameters)
        ctx.save_for_backward(output, cos, sin)
        hidden = _fed_back(weights, output)
        normed = weights.hidden_norm.forward(hidden, torch.empty_like(hidden))
        # The last anchors of the pack take nothing: they end a turn, so that the step does not train them.
        of_embed = functional.pad(weights.embed_part[step:], (0, 0, 0, min(step, len(hidden))))  # (R, W)
        heads = _heads(weights, weights.of_hidden.forward(normed, added=of_embed))  # (R, Q + 2 · G, C)
        query_key, value = heads.split([weights.num_heads + weights.num_kv_heads, weights.num_kv_heads], dim=1)
        weights.elementwise.rotate(query_key, cos, sin)
        return hidden, *query_key.split([weights.num_heads, weights.num_kv_heads], dim=1), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_through: Float[Tensor, "R H"], *grads: Tensor) -> tuple[Tensor | None, ...]:
        (output, cos, sin), weights = ctx.saved_tensors, ctx.weights
        if weights.grad_embed_part is None:
            weights.grad_embed_part = torch.zeros_like(weights.embed_part, dtype=weights.qkv.wide)
        grad_heads = weights.elementwise.join_heads(
            grads, cos, sin, num_rotated=2, total=weights.grad_embed_part, step=ctx.step
        )  # (R, W)
        grad_normed = weights.of_hidden.backward(grad_heads)
        grad, normed = weights.hidden_norm.backward(_fed_back(weights, output), grad_normed, grad_through.contiguous())
        weights.qkv.add(grad_heads, normed, part=1)
        for norm in weights.output_norms:
            grad, _ = norm.backward(output, grad, give_output=False)
        return None, grad, None, None, None, *(weights.of_feedback.gradients() if ctx.first else [])


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
        gate_up = weights.gate_up.forward(weights.mlp_norm.forward(middle, torch.empty_like(middle)))  # (R, FF)
        ctx.weights, ctx.first = weights, bool(parameters)
        ctx.save_for_backward(attended, middle, gate_up)
        return weights.down.forward(weights.elementwise.swiglu(gate_up), added=middle.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "R H"]) -> tuple[Tensor | None, ...]:
        (attended, middle, gate_up), weights = ctx.saved_tensors, ctx.weights
        grad = grad.contiguous()
        grad_activation = weights.down.backward(grad)  # (R, F)
        # In the memory of gate_up and of grad_activation.
        grad_gate_up, activation = weights.elementwise.swiglu_backward(gate_up, grad_activation)
        weights.down.add(grad, activation)
        del grad_activation, activation
        grad_normed = weights.gate_up.backward(grad_gate_up)
        grad_middle, normed = weights.mlp_norm.backward(middle, grad_normed, added=grad)
        weights.gate_up.add(grad_gate_up, normed)
        weights.o.add(grad_middle, attended)
        gradients = weights.of_output.gradients() if ctx.first else []
        return None, grad_middle, weights.o.backward(grad_middle), *gradients


class FusedLayer:
    """`Layer` whose nodes are the functions above. Made anew for every training step, as its weights are."""

    def __init__(
        self,
        head: DraftHead,
        embedding: Float[Tensor, "V H"],
        *,
        elementwise: ElementwiseKernels,
        make_products: MakeProducts,
    ) -> None:
        self.rotary = head.rotary
        self.weights = Weights(head, embedding, product_dtype(head.fc.weight), elementwise, make_products)

    def fuse(self, aux_hidden_states: Float[Tensor, "T AH"]) -> Float[Tensor, "T H"]:
        return _Fuse.apply(self.weights, aux_hidden_states, *self.weights.of_fuse.take())

    def project_context(
        self,
        hidden: Float[Tensor, "T H"],
        tokens: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        anchors: Int[Tensor, " R"],
    ) -> Projected:
        inputs = (self.weights, hidden, tokens, *self._angles(positions), anchors)
        hidden, query, key, value = _ProjectPack.apply(*inputs, *self.weights.of_attention.take())
        return hidden, query, (key, value)

    def project_step(
        self, hidden: Float[Tensor, "R H"], tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"], step: int
    ) -> Projected:
        """Do what `Layer.project_step` says; `tokens` are not read, being those of step 0, `step` anchors on."""
        inputs = (self.weights, hidden, step, *self._angles(positions))
        hidden, query, key, value = _Project.apply(*inputs, *self.weights.of_feedback.take())
        return hidden, query, (key, value)

    def output(self, hidden: Float[Tensor, "R H"], attended: Float[Tensor, "R Q C"]) -> Float[Tensor, "R H"]:
        return _Output.apply(self.weights, hidden, attended.flatten(1), *self.weights.of_output.take())

    def _angles(self, positions: Int[Tensor, " N"]) -> list[Float[Tensor, "N E"]]:
        in_float32 = positions.new_empty(0, dtype=torch.float32)
        return [part[0, :, : part.shape[-1] // 2] for part in self.rotary(in_float32, positions[None])]


def _normed_aux(
    weights: Weights, aux_hidden_states: Float[Tensor, "T AH"], weighted: bool = True
) -> Float[Tensor, "T AH"]:
    """Return what goes into `fc`: captured states, through the norms of each layer or of all where the head has any."""
    x = aux_hidden_states
    if weights.aux_norms:
        x = torch.empty_like(aux_hidden_states, dtype=weights.dtype)
        parts = (each.chunk(len(weights.aux_norms), dim=-1) for each in (aux_hidden_states, x))
        for norm, states, out in zip(weights.aux_norms, *parts, strict=True):
            norm.forward(states, out, weighted=weighted)
    return x.to(weights.dtype)


def _fed_back(weights: Weights, output: Float[Tensor, "R H"]) -> Float[Tensor, "R H"]:
    """Return `DraftHead.feedback` of a step's output."""
    for norm in weights.output_norms:
        output = norm.forward(output, torch.empty_like(output))
    return output


def _split(weights: Weights) -> tuple[slice, slice]:
    """Return which rows of the matrix make queries, and which make keys and values."""
    width = weights.num_heads * weights.head_dim
    return slice(None, width), slice(width, None)


def _heads(weights: Weights, product: Float[Tensor, "N _"]) -> Float[Tensor, "N heads C"]:
    return product.unflatten(-1, (-1, weights.head_dim))


def _add_of_pack(
    weights: Weights,
    grad_query: Float[Tensor, "R QC"],
    grad_key_value: Float[Tensor, "T _"],
    x: Float[Tensor, "T H"],
    anchors: Int[Tensor, " R"],
    part: int,
) -> None:
    """Add step 0's part of the gradient of the weights; `x` is what they were multiplied with."""
    of_query, of_key_value = _split(weights)
    weights.qkv.add(grad_query, x.index_select(0, anchors), of_query, part)
    weights.qkv.add(grad_key_value, x, of_key_value, part)
