"""`plain_loss` without its matrices: one pass through `lm_head` for all K steps, a chunk of rows at a time.

Read the reference in loss.py first; this has the same loss, metrics and gradients
(tests/head/fast/test_chunked_loss.py). Steps that ask the same teacher are in one chunk, so that each teacher is
computed once. A chunk's logits are overwritten by their gradient, which is multiplied back immediately: no tensor of
[J, D] or [R, D] ever exists. Gradients are ready with the loss, and the backward pass only scales them.

Teacher i is the one that anchor i asks at step 0. Anchors of a turn are consecutive, so anchor i asks teacher i + k at
step k. A slot is a row of the states, a pair a slot that is trained, and pairs are in the order of their teachers. For
K = 2 steps and anchors 0, 1, 2, which are one turn (so that anchor 2 is not trained at step 1):

    slot       0  1  2  3  4  5    step · R + anchor
    teacher    0  1  2  1  2  -    step + anchor
    pair       0  1  2  3  4
    its slot   0  1  3  2  4
    teacher    0  1  1  2  2       so that `bounds` is 0, 1, 3, 5: the pairs before each teacher, and all

Shapes: fast/__init__.py; KR = K · R.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.head.batch import TttBatch
from eagle3.head.divergence import Divergence
from eagle3.head.fast.elementwise import PARTIAL_SUMS, Elementwise
from eagle3.head.fast.products import MakeProducts, add_product, product_dtype, wide_product
from eagle3.head.head import Head
from eagle3.head.loss import UnrollLoss, UnrollMetrics
from eagle3.target.facts import LogitTransform

# Takes a divergence, logits (M, D), teacher logits (B, D), the teacher (M) and the weight (M) of each pair; overwrites
# the logits. `plain_loss_and_gradient` is the reference. `triton_loss_and_gradient` runs on a GPU, for soft
# cross-entropy.
LossKernel = Callable[[Divergence, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """`ComputeLoss` in chunks. Gradients of weights are summed in float32."""

    chunk: int  # rows of logits that exist at once, give or take K
    elementwise: Elementwise
    kernel: LossKernel
    make_products: MakeProducts

    def __call__(
        self,
        objective: UnrollLoss,
        head: Head,
        hidden: list[Float[Tensor, "R H"]],
        teacher_head: Float[Tensor, "D H"],
        batch: TttBatch,
        transform: LogitTransform,
    ) -> tuple[Float[Tensor, ""], UnrollMetrics]:
        with_gradients = torch.is_grad_enabled()
        projection = _Projection(head, self.elementwise, self.make_products)
        with torch.no_grad(), torch.autocast(batch.anchors.device.type, enabled=False):
            teachers = _Teachers(batch, teacher_head, transform)
            pairs = _pairs(objective, head, batch, teachers, len(hidden))
            states = torch.cat(hidden)  # (KR, H); each state's gradient takes its place
            kernel = partial(self.kernel, objective.divergence)
            row_loss, picked = self._chunk_by_chunk(kernel, pairs, teachers, projection, states, with_gradients)
            loss, metrics = torch.dot(row_loss, pairs.weight), pairs.metrics(picked, row_loss)
        if with_gradients:
            gradients = (*projection.gradients(), states.view(len(hidden), -1, states.shape[-1]))
            inputs = (head.norm.weight, head.lm_head.weight, *hidden)
            loss = _WithGradients.apply(loss, gradients, pairs.trained, self.elementwise, *inputs)
        return loss, metrics

    def _chunk_by_chunk(
        self,
        kernel: Callable[..., tuple[Tensor, Tensor]],
        pairs: "_Pairs",
        teachers: "_Teachers",
        projection: "_Projection",
        states: Float[Tensor, "KR H"],
        with_gradients: bool,
    ) -> tuple[Float[Tensor, " L"], Int[Tensor, " L"]]:
        """Return each pair's loss and argmax; with gradients, those of trained `states` are written over them."""
        losses, picked = torch.empty_like(pairs.weight), torch.empty_like(pairs.wanted)
        for asked, chunk in even_chunks(pairs.bounds, self.chunk):  # slices of teachers, and of their pairs
            slots = pairs.slots[chunk]
            logits = projection.forward(states, slots)  # (M, D)
            losses[chunk], picked[chunk] = kernel(
                logits, teachers.logits(asked), pairs.teachers[chunk] - asked.start, pairs.weight[chunk]
            )
            if with_gradients:  # logits now contain their gradient
                projection.backward(logits, states, slots)
            del logits  # freed before the next chunk's
        return losses, picked


class _Teachers:
    """The teachers that anchors ask."""

    def __init__(self, batch: TttBatch, teacher_head: Float[Tensor, "D H"], transform: LogitTransform) -> None:
        self.transform = transform
        # In the dtype of the store: products of half precision, summed in float32, are exact and fastest.
        dtype = torch.promote_types(batch.pack.last_hidden_state.dtype, teacher_head.dtype)
        self.last_hidden_state, self.head = batch.pack.last_hidden_state, teacher_head.to(dtype)
        after_anchor = (batch.anchors + 1).clamp(max=len(batch.pack.teacher_index) - 1)
        self.rows: Int[Tensor, " R"] = batch.pack.teacher_index[after_anchor]  # of J, for each teacher
        self.dtype = torch.promote_types(dtype, torch.float32)

    def logits(self, asked: slice) -> Float[Tensor, "B D"]:
        """Return logits that are not rounded to half precision, which would blur close tokens."""
        states = self.last_hidden_state.index_select(0, self.rows[asked]).to(self.head.dtype)  # (B, H)
        return self.transform(wide_product(states, self.head.T, self.dtype))


@dataclass(frozen=True)
class _Pairs:
    """Every pair's slot and teacher. In a static batch (training/step_graphs.py) all slots are pairs."""

    trained: Bool[Tensor, "K R"]
    bounds: tuple[int, ...]  # R + 1
    slots: Int[Tensor, " L"]
    teachers: Int[Tensor, " L"]
    weight: Float[Tensor, " L"]  # of the pair's loss; 0 where the teacher is outside the draft vocabulary
    wanted: Int[Tensor, " L"]  # the teacher's argmax as a draft id; -1 outside

    def metrics(self, picked: Int[Tensor, " L"], losses: Float[Tensor, " L"]) -> UnrollMetrics:
        correct = self._spread(picked == self.wanted)
        return UnrollMetrics.of(self.trained, correct, self._spread(losses * (self.wanted >= 0)))

    def _spread(self, pairs: Shaped[Tensor, " L"]) -> Shaped[Tensor, "K R"]:
        spread = pairs.new_zeros(self.trained.shape)
        spread.view(-1)[self.slots] = pairs
        return spread


def _pairs(objective: UnrollLoss, head: Head, batch: TttBatch, teachers: _Teachers, ttt_steps: int) -> _Pairs:
    num_anchors, bounds = len(batch.anchors), batch.pair_bounds
    step = torch.arange(ttt_steps, device=batch.anchors.device)[:, None]
    trained = batch.anchor_steps > step  # (K, R)
    teacher = step + torch.arange(num_anchors, device=step.device)  # (K, R)
    if bounds[-1] == trained.numel():  # all slots: those that are not trained have weight 0, and any teacher
        teacher = teacher.clamp(max=num_anchors - 1)
    else:  # sort those that are not trained to the end, where they are cut
        teacher = torch.where(trained, teacher, num_anchors)
    of_pair, slots = (part[: bounds[-1]] for part in teacher.flatten().sort(stable=True))  # (L,)
    token = batch.pack.teacher_argmax[teachers.rows[of_pair]]
    wanted = torch.searchsorted(head.draft_ids, token).clamp(max=len(head.draft_ids) - 1)
    counted = (head.draft_ids[wanted] == token) & trained.flatten()[slots]
    weight = objective.checked_weights(batch, ttt_steps, teachers.dtype)
    return _Pairs(trained, bounds, slots, of_pair, weight.flatten()[slots] * counted, torch.where(counted, wanted, -1))


class _Projection:
    """The final norm and `lm_head` on one chunk after another; their gradients are summed over the chunks."""

    def __init__(self, head: Head, elementwise: Elementwise, make_products: MakeProducts) -> None:
        self.norm_weight, self.eps = head.norm.weight.detach(), head.norm.eps
        self.weight, self.dtype = head.lm_head.weight.detach(), product_dtype(head.lm_head.weight)
        self.products, self.elementwise = make_products(self.weight.to(self.dtype)), elementwise
        self.wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.norm_sums = self.norm_weight.new_zeros((PARTIAL_SUMS, len(self.norm_weight)), dtype=self.wide)  # (X, H)
        self.trains_weight = head.lm_head.weight.requires_grad
        self.weight_sum: Float[Tensor, "D H"] | None = None

    def forward(self, states: Float[Tensor, "KR H"], slots: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
        normed = states.new_empty(len(slots), states.shape[1], dtype=self.dtype)
        self.elementwise.rms_norm(states, self.norm_weight, self.eps, normed, slots)
        return self.products.forward(normed)

    def backward(
        self, grad_logits: Float[Tensor, "M D"], states: Float[Tensor, "KR H"], slots: Int[Tensor, " M"]
    ) -> None:
        """Write the gradient of `states[slots]` over them; `grad_logits` is that of `forward`'s result."""
        grad_normed = self.products.backward(grad_logits)  # (M, H)
        normed = self.elementwise.rms_norm_backward(
            states, self.norm_weight, self.eps, grad_normed, self.norm_sums, slots, grad_x=states
        )
        if not self.trains_weight:
            return
        if self.weight_sum is None:
            self.weight_sum = wide_product(grad_logits.T, normed, self.wide)
        else:
            add_product(self.weight_sum, grad_logits.T, normed)

    def gradients(self) -> tuple[Float[Tensor, " H"], Float[Tensor, "D H"] | None]:
        """Return the gradients of the norm's weight and of `lm_head`, in float32 or wider; None if it is fixed."""
        if self.trains_weight and self.weight_sum is None:  # no chunk
            self.weight_sum = torch.zeros_like(self.weight, dtype=self.wide)
        return self.norm_sums.sum(0), self.weight_sum


class _WithGradients(torch.autograd.Function):
    """A scalar whose gradients (norm, lm_head, hidden of all steps) are known already; untrained pairs have none."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Float[Tensor, ""],
        gradients: tuple[Tensor | None, ...],
        trained: Bool[Tensor, "K R"],
        elementwise: Elementwise,
        *inputs: Tensor,
    ) -> Float[Tensor, ""]:
        ctx.save_for_backward(*gradients, trained)
        ctx.dtypes, ctx.elementwise = [tensor.dtype for tensor in inputs[:2]], elementwise
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Float[Tensor, ""]) -> tuple[Tensor | None, ...]:
        norm, weight, hidden, trained = ctx.saved_tensors
        # In place, as a copy costs gigabytes; PyTorch's version counter then refuses a second backward pass.
        ctx.elementwise.scale_rows(norm[None], scale, None)
        ctx.elementwise.scale_rows(hidden.flatten(0, 1), scale, trained.flatten())
        if weight is not None:
            ctx.elementwise.scale_rows(weight, scale, None)
            weight = weight.to(ctx.dtypes[1])
        return None, None, None, None, norm.to(ctx.dtypes[0]), weight, *hidden.unbind()


def plain_loss_and_gradient(
    divergence: Divergence,
    logits: Float[Tensor, "M D"],
    teacher_logits: Float[Tensor, "B D"],
    teacher_of: Int[Tensor, " M"],
    weight: Float[Tensor, " M"],
) -> tuple[Float[Tensor, " M"], Int[Tensor, " M"]]:
    """Return each pair's divergence from its teacher, and its argmax.

    `logits` are overwritten with the gradient of weight · divergence.
    """
    teacher = divergence.of_target(teacher_logits).index_select(0, teacher_of)  # (M, D)
    wide = logits.to(teacher.dtype)
    best = wide.argmax(-1)
    log_sum = wide.logsumexp(-1)
    loss = divergence.value(wide, log_sum, teacher)
    logits.copy_(divergence.gradient(wide, log_sum, teacher).mul_(weight[:, None]))
    return loss, best


def even_chunks(bounds: tuple[int, ...], size: int) -> list[tuple[slice, slice]]:
    """Cut teachers and their pairs into chunks of about `size` pairs each, with no small remainder.

    A teacher's pairs stay together: bounds 0, 1, 3, 5 and size 3 give teachers 0, 1 with pairs 0 … 2, and teacher 2
    with pairs 3, 4.
    """
    total = bounds[-1]
    number = max(1, -(-total // size))
    cuts = [bisect_left(bounds, total * chunk // number) for chunk in range(number + 1)]
    return [(slice(a, b), slice(bounds[a], bounds[b])) for a, b in pairwise(cuts) if bounds[a] < bounds[b]]
