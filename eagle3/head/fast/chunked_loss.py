"""`UnrollLoss` without its matrices: one pass through `lm_head` for all K steps, a chunk of rows at a time.

The plain version in loss.py is the one to read first; this one has its loss, metrics and gradients
(tests/head/fast/test_chunked_loss.py). Steps that ask the same teacher sit in one chunk, so that each teacher is
computed once. A chunk's logits turn into their own gradient in place and are multiplied back at once: no tensor of
[J, D] or [R, D] ever exists. Gradients are thus ready when the loss is, and the backward pass only scales them.

Shapes: R trained rows, K steps, P trained (step, row) pairs, C teachers and M pairs of a chunk, J teacher rows, H
hidden size, D draft vocabulary.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.errors import InputError
from eagle3.head.batch import TttBatch
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.fast.elementwise import PARTIAL_SUMS, choose_kernels
from eagle3.head.fast.kernel_choice import runs_triton
from eagle3.head.fast.products import (
    Float8Products,
    Products,
    add_product,
    float8_obstacle,
    product_dtype,
    wide_product,
)
from eagle3.head.loss import UnrollLoss, UnrollMetrics

LossAndGradient = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ChunkedUnrollLoss(UnrollLoss):
    """`chunk_rows`: rows of logits that exist at once, give or take K. Gradients of weights are summed in float32."""

    make_products: ClassVar[type[Products]] = Products
    chunk_rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_rows < 1:
            raise InputError(f"loss.chunk_rows={self.chunk_rows} must be 1 or more, e.g. loss.chunk_rows=4096")

    def __call__(
        self, head: DraftHead, hidden: list[Float[Tensor, "R H"]], teacher_head: Float[Tensor, "D H"], batch: TttBatch
    ) -> tuple[Float[Tensor, ""], UnrollMetrics]:
        with_gradients = torch.is_grad_enabled()
        projection = _Projection(head, product_dtype(head.lm_head.weight), self.make_products)
        with torch.no_grad(), torch.autocast(batch.anchors.device.type, enabled=False):
            teachers = _Teachers(batch, teacher_head)
            pairs = self._pairs(head, batch, teachers, len(hidden))
            states = torch.cat(hidden)  # (K·R, H); each state's gradient takes its place
            row_loss, picked = self._chunk_by_chunk(pairs, teachers, projection, states, with_gradients)
            loss, metrics = torch.dot(row_loss, pairs.weight), pairs.metrics(picked)
        if with_gradients:
            gradients = (*projection.gradients(), states.view(len(hidden), -1, states.shape[-1]))
            inputs = (head.norm.weight, head.lm_head.weight, *hidden)
            loss = _WithGradients.apply(loss, gradients, pairs.trained, *inputs)
        return loss, metrics

    def _chunk_by_chunk(
        self,
        pairs: "_Pairs",
        teachers: "_Teachers",
        projection: "_Projection",
        states: Float[Tensor, "K*R H"],
        with_gradients: bool,
    ) -> tuple[Float[Tensor, " P"], Int[Tensor, " P"]]:
        """Each pair's loss and argmax; with gradients, those of trained `states` are written over them."""
        loss_and_gradient = choose_kernel(states.device, teachers.dtype)
        losses, picked = torch.empty_like(pairs.weight), torch.empty_like(pairs.wanted)
        for asked, chunk in even_chunks(pairs.bounds, self.chunk_rows):
            slots = pairs.slots[chunk]
            logits = projection.forward(states, slots)
            losses[chunk], picked[chunk] = loss_and_gradient(
                logits, teachers.logits(asked), pairs.teachers[chunk] - asked.start, pairs.weight[chunk]
            )
            if with_gradients:
                projection.backward(logits, states, slots)  # over states[slots]
            del logits  # before the next chunk's are there too
        return losses, picked

    def _pairs(self, head: DraftHead, batch: TttBatch, teachers: "_Teachers", ttt_steps: int) -> "_Pairs":
        num_rows, bounds = len(batch.anchors), batch.pair_bounds
        step = torch.arange(ttt_steps, device=batch.anchors.device)[:, None]
        trained = batch.anchor_steps > step
        # Rows of a turn are neighbours: row i asks at step k the teacher that row i + k asks at step 0.
        teacher = torch.where(trained, step + torch.arange(num_rows, device=step.device), num_rows)
        of_pair, slots = (part[: bounds[-1]] for part in teacher.flatten().sort(stable=True))
        token = batch.pack.teacher_argmax[teachers.rows[of_pair]]
        wanted = torch.searchsorted(head.draft_ids, token).clamp(max=len(head.draft_ids) - 1)
        counted = head.draft_ids[wanted] == token
        weight = self._row_weight(batch).to(teachers.dtype) * torch.pow(self.decay, step.to(teachers.dtype))
        return _Pairs(
            trained, bounds, slots, of_pair, weight.flatten()[slots] * counted, torch.where(counted, wanted, -1)
        )


class _Teachers:
    """The teachers that are asked, in the order of the rows that ask them at step 0."""

    def __init__(self, batch: TttBatch, teacher_head: Float[Tensor, "D H"]) -> None:
        # As the store has both: products of half precision summed in float32 are exact, and the fastest.
        dtype = torch.promote_types(batch.pack.last_hidden_state.dtype, teacher_head.dtype)
        self.last, self.head = batch.pack.last_hidden_state, teacher_head.to(dtype)
        self.rows: Int[Tensor, " R"] = batch.pack.teacher_index[
            (batch.anchors + 1).clamp(max=len(batch.pack.teacher_index) - 1)
        ]
        self.dtype = torch.promote_types(dtype, torch.float32)

    def logits(self, asked: slice) -> Float[Tensor, "C D"]:
        """Not rounded to half precision, which would blur close tokens."""
        return wide_product(self.last.index_select(0, self.rows[asked]).to(self.head.dtype), self.head.T, self.dtype)


class Float8ChunkedLoss(ChunkedUnrollLoss):
    """With `lm_head`'s products in float8, but that of its weight's gradient. The teacher's stay as they are."""

    make_products = Float8Products

    def require(self, *, device: torch.device, precision: str, config: HeadConfig) -> None:
        sizes = {"the target's hidden size": config.hidden_size, "model.draft_vocab_size": config.draft_vocab_size}
        obstacle = float8_obstacle(device, precision, sizes)
        if obstacle:
            raise InputError(f"loss=chunked_fp8 {obstacle}; loss=chunked multiplies in the trainer's precision")


@dataclass(frozen=True)
class _Pairs:
    """The trained (step, row) pairs, ordered by their teacher."""

    trained: Bool[Tensor, "K R"]
    bounds: tuple[int, ...]  # R + 1: how many pairs come before each teacher
    slots: Int[Tensor, " P"]  # step · R + row
    teachers: Int[Tensor, " P"]  # index into `_Teachers.rows`
    weight: Float[Tensor, " P"]  # of the pair's loss; 0 where the teacher is outside the draft vocabulary
    wanted: Int[Tensor, " P"]  # the teacher's argmax as a draft id; -1 outside

    def metrics(self, picked: Int[Tensor, " P"]) -> UnrollMetrics:
        correct = torch.zeros_like(self.trained)
        correct.view(-1)[self.slots] = picked == self.wanted
        alive = correct.long().cumprod(0)
        num_rows = torch.full((), self.trained.shape[1], device=picked.device)
        return UnrollMetrics(num_rows, self.trained.sum(1), correct.sum(1), alive.sum(1), alive.sum(0))


class _Projection:
    """The final norm and `lm_head` on one chunk after another; their gradients are summed over the chunks."""

    def __init__(self, head: DraftHead, dtype: torch.dtype, make_products: type[Products]) -> None:
        self.norm_weight, self.eps = head.norm.weight.detach(), head.norm.eps
        self.weight = head.lm_head.weight.detach()
        self.dtype, self.products = dtype, make_products(self.weight.to(dtype))
        self.kernels = choose_kernels(self.weight.device, dtype)
        self.wide = torch.promote_types(self.weight.dtype, torch.float32)
        self.norm_sums = self.norm_weight.new_zeros((PARTIAL_SUMS, len(self.norm_weight)), dtype=self.wide)
        self.weight_sum: Float[Tensor, "D H"] | None = None

    def forward(self, states: Float[Tensor, "K*R H"], slots: Int[Tensor, " M"]) -> Float[Tensor, "M D"]:
        normed = states.new_empty(len(slots), states.shape[1], dtype=self.dtype)
        self.kernels.rms_norm(states, self.norm_weight, self.eps, normed, slots)
        return self.products.forward(normed)

    def backward(
        self, gradient: Float[Tensor, "M D"], states: Float[Tensor, "K*R H"], slots: Int[Tensor, " M"]
    ) -> None:
        """The gradient of `states[slots]` takes their place; `gradient` is that of `forward`'s result."""
        outer = self.products.backward(gradient)
        # `outer` becomes what the norm gave, which the weight's gradient needs.
        self.kernels.rms_norm_backward(states, self.norm_weight, self.eps, outer, self.norm_sums, slots, grad_x=states)
        if self.weight_sum is None:
            self.weight_sum = wide_product(gradient.T, outer, self.wide)
        else:
            add_product(self.weight_sum, gradient.T, outer)

    def gradients(self) -> tuple[Float[Tensor, " H"], Float[Tensor, "D H"]]:
        """Of the norm's weight and of `lm_head`'s, in float32 at least."""
        if self.weight_sum is None:  # no chunk
            self.weight_sum = torch.zeros_like(self.weight, dtype=self.wide)
        return self.norm_sums.sum(0), self.weight_sum


class _WithGradients(torch.autograd.Function):
    """A scalar whose gradients (norm, lm_head, hidden of all steps) are known already; untrained pairs have none."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: tuple[Tensor, ...], trained: Bool[Tensor, "K R"], *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*gradients, trained)
        ctx.dtypes = [tensor.dtype for tensor in inputs[:2]]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        norm, weight, hidden, trained = ctx.saved_tensors
        # In place, as a copy costs gigabytes; PyTorch's version counter then refuses a second backward pass.
        for gradient, kept in (norm[None], None), (weight, None), (hidden.flatten(0, 1), trained.flatten()):
            choose_kernels(gradient.device, gradient.dtype).scale_rows(gradient, scale, kept)
        return None, None, None, norm.to(ctx.dtypes[0]), weight.to(ctx.dtypes[1]), *hidden.unbind()


def loss_and_gradient(
    logits: Float[Tensor, "M D"],
    teacher_logits: Float[Tensor, "C D"],
    teacher_of: Int[Tensor, " M"],
    weight: Float[Tensor, " M"],
) -> tuple[Float[Tensor, " M"], Int[Tensor, " M"]]:
    """Each pair's cross-entropy against its teacher's softmax, and its argmax; reference of the kernel on the GPU.

    `logits` are overwritten with weight · (softmax(logits) - softmax(teacher)), the gradient of weight · loss.
    """
    teacher = teacher_logits.softmax(-1).index_select(0, teacher_of)
    wide = logits.to(teacher.dtype)
    best = wide.argmax(-1)
    log_sum = wide.logsumexp(-1)
    loss = log_sum - torch.linalg.vecdot(teacher, wide)
    logits.copy_(wide.sub_(log_sum[:, None]).exp_().sub_(teacher).mul_(weight[:, None]))
    return loss, best


def choose_kernel(device: torch.device, dtype: torch.dtype) -> LossAndGradient:
    """Triton's kernel on a GPU, if Triton (a part of PyTorch's CUDA builds) is there; else plain PyTorch."""
    if runs_triton(device, dtype):
        from eagle3.head.fast import loss_kernel

        return loss_kernel.loss_and_gradient
    return loss_and_gradient


def even_chunks(bounds: tuple[int, ...], size: int) -> list[tuple[slice, slice]]:
    """Teachers and their pairs, cut into chunks of almost the same number of pairs: about `size`, no small rest.

    `bounds` [C + 1]: how many pairs come before each teacher. A teacher's pairs stay together.
    """
    total = bounds[-1]
    number = max(1, -(-total // size))
    cuts = [bisect_left(bounds, total * chunk // number) for chunk in range(number + 1)]
    return [(slice(a, b), slice(bounds[a], bounds[b])) for a, b in pairwise(cuts) if bounds[a] < bounds[b]]
