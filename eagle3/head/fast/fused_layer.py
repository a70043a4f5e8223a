"""`PlainLayer` at the speed of its matrix products: same numbers (tests/head/fast/test_fused_layer.py), for the GPU.

At each of the K steps, plain autograd casts every weight, casts every weight's bfloat16 gradient to add it in float32,
and passes over memory for norms, RoPE, SwiGLU and residuals. Here

- weights are cast once per training step, with q/k/v and gate/up in one matrix each: fewer and larger products;
- products add a weight's gradient to one float32 sum over all steps, which autograd gets once, when it is complete;
- cheap intermediates are recomputed in the backward, in the memory of a gradient that is no longer needed;
- the embeddings' part of queries, keys and values, half of those products, is computed once for all steps.

Every autograd node here is a part of `DraftHead`, with the equations of elementwise.py. `weights` is one object for all
nodes; its gradients and its `embed_part` are all that passes between them besides autograd's tensors. Forwards run from
left to right, backwards from right to left:

                       fuse     context       output 0   project 1     output 1   project 2     …
    forward                     writes                   reads                    reads               embed_part
    backward                    takes                    adds to                  adds to             its total
    backward returns   of_fuse  of_attention  of_output  of_feedback                                  gradients of

Shapes: fast/__init__.py.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.head.draft_head import DraftHead
from eagle3.head.fast.elementwise import Elementwise
from eagle3.head.fast.fused_weights import EMBED, HIDDEN, Weights
from eagle3.head.fast.products import MakeProducts, product_dtype
from eagle3.head.layer import PlainLayer, Projected


class _Fuse(torch.autograd.Function):
    """`DraftHead.fuse`; the captured states are data and get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, weights: Weights, aux_hidden_states: Float[Tensor, "T AH"], *parameters: Tensor
    ) -> Float[Tensor, "T H"]:
        ctx.weights = weights
        ctx.save_for_backward(aux_hidden_states)
        hidden = weights.fc.forward(_normed_aux(weights, aux_hidden_states))
        weights.fc.free()  # its input is data, or norms of data: the backward needs no product with fc
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "T H"]) -> tuple[Tensor | None, ...]:
        (aux_hidden_states,), weights = ctx.saved_tensors, ctx.weights
        weights.fc.add(grad, _normed_aux(weights, aux_hidden_states, weighted=False))
        weights.fc.share_gradient(weights.aux_norms)
        return None, None, *weights.of_fuse.gradients()


class _ProjectContext(torch.autograd.Function):
    """Step 0: keys and values of all tokens, hidden states and queries of the anchors."""

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
        of_query, of_key_value = weights.query_rows, weights.key_value_rows
        query = weights.qkv.forward(embed.index_select(0, anchors), of_query, part=EMBED)  # (R, QC)
        key_value = weights.qkv.forward(embed, of_key_value, part=EMBED)  # (T, 2 · G · C)
        weights.embed_part.value = torch.cat([query, key_value.index_select(0, anchors)], dim=1)  # (R, W)
        query = weights.qkv.forward(normed.index_select(0, anchors), of_query, added=query, part=HIDDEN)
        key_value = weights.qkv.forward(normed, of_key_value, added=key_value, part=HIDDEN)
        query, key_value = _heads(weights, query), _heads(weights, key_value)
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
        of_query, of_key_value = weights.query_rows, weights.key_value_rows
        grad_normed = weights.qkv.backward(grad_key_value, of_key_value, part=HIDDEN)  # (T, H)
        # Every anchor is one row, so this needs no atomic additions, which `index_add_` would make.
        grad_normed.index_copy_(
            0, anchors, weights.qkv.backward(grad_query, of_query, grad_normed.index_select(0, anchors), part=HIDDEN)
        )
        grad_hidden, normed = weights.hidden_norm.backward(hidden, grad_normed)
        grad_hidden.index_copy_(0, anchors, grad_hidden.index_select(0, anchors).add_(grad_anchors))
        _add_context(weights, grad_query, grad_key_value, normed, anchors, part=HIDDEN)
        # Freed before `embed`, which is as large: if most tokens are prompts, memory peaks here.
        del grad_normed, normed
        if weights.embed_part.total is not None:
            sizes = [grad_query.shape[1], grad_key_value.shape[1]]
            later_query, later_key_value = weights.embed_part.total.split(sizes, dim=1)
            grad_query.add_(later_query)
            grad_key_value.index_copy_(
                0, anchors, (later_key_value + grad_key_value.index_select(0, anchors)).to(grad_key_value.dtype)
            )
        embed = weights.embed_norm.forward(weights.embedding, torch.empty_like(hidden), tokens, weighted=False)
        _add_context(weights, grad_query, grad_key_value, embed, anchors, part=EMBED)
        weights.qkv.share_gradient([weights.embed_norm], part=EMBED)
        return None, grad_hidden, None, None, None, None, *weights.of_attention.gradients()


class _ProjectStep(torch.autograd.Function):
    """Later steps, at the anchors only, after `DraftHead.feedback`, whose result is recomputed in the backward.

    The hidden state is passed through: its gradient is added in the norm's kernel.
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
        ctx.weights, ctx.step = weights, step
        ctx.save_for_backward(output, cos, sin)
        hidden = _fed_back(weights, output)
        normed = weights.hidden_norm.forward(hidden, torch.empty_like(hidden))
        product = weights.qkv.forward(normed, added=weights.embed_part.at(step), part=HIDDEN)  # (R, W)
        heads = _heads(weights, product)  # (R, Q + 2 · G, C)
        query_key, value = heads.split([weights.num_heads + weights.num_kv_heads, weights.num_kv_heads], dim=1)
        weights.elementwise.rotate(query_key, cos, sin)
        return hidden, *query_key.split([weights.num_heads, weights.num_kv_heads], dim=1), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_through: Float[Tensor, "R H"], *grads: Tensor) -> tuple[Tensor | None, ...]:
        (output, cos, sin), weights = ctx.saved_tensors, ctx.weights
        of_embed = weights.embed_part
        if of_embed.total is None:
            of_embed.total = torch.zeros_like(of_embed.value, dtype=weights.qkv.wide)
        grad_heads = weights.elementwise.join_heads(
            grads, cos, sin, num_rotated=2, total=of_embed.total, step=ctx.step
        )  # (R, W)
        grad_normed = weights.qkv.backward(grad_heads, part=HIDDEN)
        grad, normed = weights.hidden_norm.backward(_fed_back(weights, output), grad_normed, grad_through.contiguous())
        weights.qkv.add(grad_heads, normed, part=HIDDEN)
        for norm in weights.output_norms:
            grad, _ = norm.backward(output, grad, give_output=False)
        gradients = weights.of_feedback.gradients() if ctx.step == 1 else []
        return None, grad, None, None, None, *gradients


class _Output(torch.autograd.Function):
    """`DraftHead.output`. Residuals are added inside the products."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Weights,
        step: int,
        hidden: Float[Tensor, "R H"],
        attended: Float[Tensor, "R QC"],
        *parameters: Tensor,
    ) -> Float[Tensor, "R H"]:
        middle = weights.o.forward(attended, added=hidden.clone())
        gate_up = weights.gate_up.forward(weights.mlp_norm.forward(middle, torch.empty_like(middle)))  # (R, FF)
        ctx.weights, ctx.step = weights, step
        ctx.save_for_backward(attended, middle, gate_up)
        return weights.down.forward(weights.elementwise.swiglu(gate_up), added=middle.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "R H"]) -> tuple[Tensor | None, ...]:
        (attended, middle, gate_up), weights = ctx.saved_tensors, ctx.weights
        grad = grad.contiguous()
        grad_activation = weights.down.backward(grad)  # (R, F)
        # Both in place: in the memory of gate_up and of grad_activation.
        grad_gate_up, activation = weights.elementwise.swiglu_backward(gate_up, grad_activation)
        weights.down.add(grad, activation)
        del grad_activation, activation
        grad_normed = weights.gate_up.backward(grad_gate_up)
        grad_middle, normed = weights.mlp_norm.backward(middle, grad_normed, added=grad)
        weights.gate_up.add(grad_gate_up, normed)
        weights.o.add(grad_middle, attended)
        gradients = weights.of_output.gradients() if ctx.step == 0 else []
        return None, None, grad_middle, weights.o.backward(grad_middle), *gradients


class FusedLayer(PlainLayer):
    """`PlainLayer` on the autograd nodes above. Made for one training step, like its weights."""

    def __init__(
        self,
        head: DraftHead,
        embedding: Float[Tensor, "V H"],
        *,
        elementwise: Elementwise,
        make_products: MakeProducts,
    ) -> None:
        self.rotary = head.rotary
        self.weights = Weights(head, embedding, product_dtype(head.fc.weight), elementwise, make_products)
        self.step = 0  # the latest that was projected

    def fuse(self, aux_hidden_states: Float[Tensor, "T AH"]) -> Float[Tensor, "T H"]:
        return _Fuse.apply(self.weights, aux_hidden_states, *self.weights.of_fuse.parameters())

    def project_context(
        self,
        hidden: Float[Tensor, "T H"],
        tokens: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        anchors: Int[Tensor, " R"],
    ) -> Projected:
        self.step = 0
        inputs = (self.weights, hidden, tokens, *self._angles(positions), anchors)
        hidden, query, key, value = _ProjectContext.apply(*inputs, *self.weights.of_attention.parameters())
        return hidden, query, (key, value)

    def project_step(
        self, hidden: Float[Tensor, "R H"], tokens: Int[Tensor, " R"], positions: Int[Tensor, " R"], step: int
    ) -> Projected:
        """`tokens` is ignored: they are those of step 0, shifted by `step` anchors."""
        self.step = step
        inputs = (self.weights, hidden, step, *self._angles(positions))
        parameters = self.weights.of_feedback.parameters() if step == 1 else []
        hidden, query, key, value = _ProjectStep.apply(*inputs, *parameters)
        return hidden, query, (key, value)

    def output(self, hidden: Float[Tensor, "R H"], attended: Float[Tensor, "R Q C"]) -> Float[Tensor, "R H"]:
        parameters = self.weights.of_output.parameters() if self.step == 0 else []
        return _Output.apply(self.weights, self.step, hidden, attended.flatten(1), *parameters)

    def _angles(self, positions: Int[Tensor, " N"]) -> list[Float[Tensor, "N E"]]:
        in_float32 = positions.new_empty(0, dtype=torch.float32)
        return [part[0, :, : part.shape[-1] // 2] for part in self.rotary(in_float32, positions[None])]


def _normed_aux(
    weights: Weights, aux_hidden_states: Float[Tensor, "T AH"], weighted: bool = True
) -> Float[Tensor, "T AH"]:
    """Return the input of `fc`: the captured states, normed per layer or all at once if the head does that."""
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


def _heads(weights: Weights, product: Float[Tensor, "N _"]) -> Float[Tensor, "N heads C"]:
    return product.unflatten(-1, (-1, weights.head_dim))


def _add_context(
    weights: Weights,
    grad_query: Float[Tensor, "R QC"],
    grad_key_value: Float[Tensor, "T _"],
    x: Float[Tensor, "T H"],
    anchors: Int[Tensor, " R"],
    part: int,
) -> None:
    """Add step 0's share of the gradient of `qkv`; `x` is the input of this part."""
    weights.qkv.add(grad_query, x.index_select(0, anchors), weights.query_rows, part)
    weights.qkv.add(grad_key_value, x, weights.key_value_rows, part)
