"""The middle of `ChunkedLoss` in Triton: logits become loss, argmax and their own gradient in one kernel.

It computes soft cross-entropy: loss log Σ exp(logits) - Σ softmax(teacher) · logits, gradient softmax(logits) -
softmax(teacher). Other divergences run in PyTorch: `plain_loss_and_gradient` copies the logits to float32, gathers a
teacher for each pair and passes over both several times. Here each is read twice, in blocks, and nothing of their size
is allocated. A sum of exponentials takes one pass, with a running maximum (arXiv:1805.02867).

Shapes: fast/__init__.py.
"""

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.head.divergence import SOFT_CROSS_ENTROPY, Divergence
from eagle3.head.fast.triton_jit import triton_jit

BLOCK = 2048  # vocabulary entries a program holds at a time
NUM_WARPS = 8


def triton_loss_and_gradient(
    divergence: Divergence,
    logits: Float[Tensor, "M D"],
    teacher_logits: Float[Tensor, "B D"],
    teacher_of: Int[Tensor, " M"],
    weight: Float[Tensor, " M"],
) -> tuple[Float[Tensor, " M"], Int[Tensor, " M"]]:
    """`LossKernel` for teachers in float32; of equal maximal logits the first is the argmax."""
    assert divergence == SOFT_CROSS_ENTROPY
    assert logits.is_contiguous() and teacher_logits.is_contiguous() and teacher_logits.dtype == torch.float32
    loss, best = torch.empty_like(weight), torch.empty_like(teacher_of)
    log_sums = teacher_logits.new_empty(len(teacher_logits))
    constants = {"DRAFT_VOCAB_SIZE": logits.shape[1], "BLOCK": BLOCK, "num_warps": NUM_WARPS}
    _log_sum_of_teacher[(len(teacher_logits),)](teacher_logits, log_sums, **constants)
    _one_pair[(len(logits),)](logits, teacher_logits, log_sums, teacher_of, weight, loss, best, **constants)
    return loss, best


@triton_jit
def _with_logit(highest, total, logit):
    """Add one logit to a lane's running maximum, and to its sum of exponentials relative to that maximum.

    Of the two factors, of the sum and of the logit, one is 1: a single exponential gives both.
    """
    factor = tl.exp(-tl.abs(logit - highest))
    total = tl.where(logit > highest, total * factor + 1, total + factor)
    return tl.maximum(highest, logit), total


# PyTorch's own goes over the logits four times.
@triton_jit
def _log_sum_of_teacher(
    # Pointers.
    teacher_logits,  # [B, D]
    log_sums,  # [B]
    # Constants.
    DRAFT_VOCAB_SIZE: tl.constexpr,  # D
    BLOCK: tl.constexpr,  # entries that a program holds at a time
):
    teacher = tl.program_id(0).to(tl.int64)
    teacher_logits += teacher * DRAFT_VOCAB_SIZE
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, DRAFT_VOCAB_SIZE, BLOCK):
        column = start + lane
        logit = tl.load(teacher_logits + column, column < DRAFT_VOCAB_SIZE, other=-1e30)
        highest, total = _with_logit(highest, total, logit)
    top = tl.max(highest, 0)
    tl.store(log_sums + teacher, top + tl.log(tl.sum(total * tl.exp(highest - top), 0)))


# Slices of a pack's tensors begin anywhere: a kernel for each alignment would be compiled in the middle of training.
@triton_jit(do_not_specialize_on_alignment=["teacher_log_sums", "teacher_of", "weights", "losses", "bests"])
def _one_pair(
    # Pointers.
    logits,  # [M, D], which become their gradient
    teacher_logits,  # [B, D]
    teacher_log_sums,  # [B]
    teacher_of,  # [M]
    weights,  # [M]
    losses,  # [M]
    bests,  # [M]
    # Constants.
    DRAFT_VOCAB_SIZE: tl.constexpr,  # D
    BLOCK: tl.constexpr,  # entries that a program holds at a time
):
    pair = tl.program_id(0).to(tl.int64)  # M · D may be past 2^31
    teacher = tl.load(teacher_of + pair).to(tl.int64)
    logits += pair * DRAFT_VOCAB_SIZE
    teacher_logits += teacher * DRAFT_VOCAB_SIZE
    teacher_log_sum = tl.load(teacher_log_sums + teacher)
    lane = tl.arange(0, BLOCK)

    # First pass: every lane keeps its own running maximum, sum and first place of the maximum; folded once at the end.
    # "Nothing yet" is a finite number, as the difference of two infinities is not a number.
    highest = tl.full([BLOCK], -1e30, tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, DRAFT_VOCAB_SIZE, BLOCK):
        column = start + lane
        inside = column < DRAFT_VOCAB_SIZE
        logit = tl.load(logits + column, inside, other=-1e30).to(tl.float32)
        place = tl.where(logit > highest, column, place)
        highest, total = _with_logit(highest, total, logit)
    top = tl.max(highest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    tl.store(bests + pair, tl.min(tl.where(highest == top, place, DRAFT_VOCAB_SIZE), 0))

    # Second pass: the gradient takes the logits' place. The loss is summed from terms that are all positive.
    weight = tl.load(weights + pair)
    loss = tl.zeros([BLOCK], tl.float32)
    for start in range(0, DRAFT_VOCAB_SIZE, BLOCK):
        column = start + lane
        inside = column < DRAFT_VOCAB_SIZE
        logit = tl.load(logits + column, inside, other=-1e30).to(tl.float32)
        probability = tl.exp(tl.load(teacher_logits + column, inside, other=-1e30) - teacher_log_sum)
        loss += probability * (log_sum - logit)  # 0 · 1e30 outside
        gradient = weight * (tl.exp(logit - log_sum) - probability)
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), inside)
    tl.store(losses + pair, tl.sum(loss, 0))
