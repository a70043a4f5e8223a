"""The objective of the unroll and its metrics, in plain PyTorch.

Loss of an anchor: the draft's divergence (divergence.py) from the teacher's softmax restricted to and renormalised on
the draft vocabulary. Anchors whose teacher's argmax is outside the draft vocabulary carry no loss and count as wrong.

Shapes: R anchors, J positions with a teacher, H hidden size, D draft vocabulary, K steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from eagle3.errors import InputError
from eagle3.head.batch import TttBatch
from eagle3.head.divergence import SOFT_CROSS_ENTROPY, Divergence
from eagle3.head.draft_vocab import membership
from eagle3.head.head import Head
from eagle3.settings.training import LossSettings
from eagle3.target.facts import PLAIN, LogitTransform


@dataclass(frozen=True)
class UnrollMetrics:
    """Sums over anchors, so that packs and ranks can be added: divide by `anchors` (or `trained` for accuracy).

    Only `accepted` is not summed."""

    anchors: Int[Tensor, ""]
    trained: Int[Tensor, " K"]  # anchors trained at the step
    correct: Int[Tensor, " K"]  # of those, draft argmax = teacher argmax
    alive: Int[Tensor, " K"]  # of all anchors, correct at this and every earlier step
    divergence: Float[Tensor, " K"]  # of the trained anchors: the loss without weights and decay
    accepted: Int[Tensor, " R"]  # leading steps that are correct at each anchor

    @classmethod
    def of(cls, trained: Bool[Tensor, "K R"], correct: Bool[Tensor, "K R"], divergence: Float[Tensor, "K R"]) -> Self:
        """`divergence` is 0 where there is no loss."""
        alive, of_step = correct.long().cumprod(0), trained.sum(1)
        # Every anchor is trained at step 0; those that only fill up a batch (step_graphs.py) at none.
        return cls(of_step[0], of_step, correct.sum(1), alive.sum(1), divergence.sum(1), alive.sum(0))

    def as_tensor(self) -> Float[Tensor, " sums"]:
        """Return the 4 K + 1 sums, in float32 or wider: exact up to 16 million anchors."""
        return torch.cat([self.anchors[None], self.trained, self.correct, self.alive, self.divergence])


# Evaluates an objective, with the arguments of `plain_loss`: that itself, or in chunks `ChunkedLoss` in fast/.
ComputeLoss = Callable[
    ["UnrollLoss", Head, list[Tensor], Tensor, TttBatch, LogitTransform], tuple[Tensor, UnrollMetrics]
]


def plain_loss(
    objective: "UnrollLoss",
    head: Head,
    hidden: list[Float[Tensor, "R H"]],
    teacher_head: Float[Tensor, "D H"],
    batch: TttBatch,
    transform: LogitTransform,
) -> tuple[Float[Tensor, ""], UnrollMetrics]:
    """Return the loss and the metrics, step by step: the reference for `ChunkedLoss`."""
    pack = batch.pack
    with torch.autocast(teacher_head.device.type, enabled=False):  # bf16 logits would blur close teacher tokens
        wide = torch.promote_types(teacher_head.dtype, torch.float32)
        teacher_logits = transform(pack.last_hidden_state.to(wide) @ teacher_head.to(wide).T)
        teachers = objective.divergence.of_target(teacher_logits)  # (J, D)
    in_vocabulary = membership(head.draft_ids, head.config.vocab_size)[pack.teacher_argmax]  # (J,)
    step = torch.arange(len(hidden), device=batch.anchors.device)[:, None]
    trained = batch.anchor_steps > step  # (K, R)
    teacher = pack.teacher_index[(batch.anchors + 1 + step).clamp(max=len(pack.teacher_index) - 1)]  # (K, R)
    losses, correct = [], []
    for output, asked, counts in zip(hidden, teacher, trained, strict=True):
        logits = head.logits(output).to(teachers.dtype)  # (R, D)
        divergence = objective.divergence.value(logits, logits.logsumexp(-1), teachers[asked])  # (R,)
        losses.append(divergence * (counts & in_vocabulary[asked]))
        correct.append(counts & (head.draft_ids[logits.argmax(-1)] == pack.teacher_argmax[asked]))
    in_all, right = torch.stack(losses), torch.stack(correct)
    weight = objective.checked_weights(batch, len(hidden), in_all.dtype)
    return (in_all * weight).sum(), UnrollMetrics.of(trained, right, in_all.detach())


@dataclass(frozen=True, kw_only=True)
class UnrollLoss(LossSettings):
    """Sum over steps of decay^k times the anchors' divergences.

    normalize="token" divides by the anchors of the whole optimizer step, "sequence" gives every sample the same weight.
    Neither counts padding or prompts.
    """

    divergence: Divergence = SOFT_CROSS_ENTROPY  # type: ignore[assignment]  # built of the part

    def __call__(
        self,
        head: Head,
        hidden: list[Float[Tensor, "R H"]],
        teacher_head: Float[Tensor, "D H"],
        batch: TttBatch,
        compute: ComputeLoss = plain_loss,
        transform: LogitTransform = PLAIN,
    ) -> tuple[Float[Tensor, ""], UnrollMetrics]:
        """Return the loss and the metrics. Another objective may evaluate itself, without `compute`.

        `transform` is applied to the target's logits; the head is trained to match the result."""
        return compute(self, head, hidden, teacher_head, batch, transform)

    def units(self, batch: TttBatch) -> tuple[float, int]:
        """Return the anchors, or samples, that the loss is divided by, and how many of them are in this batch."""
        pack = batch.pack
        if self.normalize == "token":
            return pack.anchors_in_step, batch.num_anchors
        return pack.samples_in_step, len(pack.sample_ids)

    def anchor_weights(self, batch: TttBatch, dtype: torch.dtype) -> Float[Tensor, " R"]:
        in_step, _ = self.units(batch)
        if self.normalize == "token":
            return torch.ones_like(batch.anchors, dtype=dtype) / in_step
        return 1 / (batch.anchors_of_sample.to(dtype) * in_step)

    def weights(self, batch: TttBatch, ttt_steps: int, dtype: torch.dtype) -> Float[Tensor, "K R"]:
        step = torch.arange(ttt_steps, device=batch.anchors.device, dtype=dtype)
        weights: Any = self.anchor_weights(batch, dtype)
        if not isinstance(weights, Tensor):
            found = type(weights).__name__
            raise InputError(f"loss={type(self).__name__}: its `anchor_weights` returns {found}; return a tensor (R,)")
        return weights * torch.pow(self.decay, step)[:, None]

    def checked_weights(self, batch: TttBatch, ttt_steps: int, dtype: torch.dtype) -> Float[Tensor, "K R"]:
        """Return `weights`, of which a subclass may have its own, after a look at the shape."""
        weights: Any = self.weights(batch, ttt_steps, dtype)
        shape = [ttt_steps, len(batch.anchors)]
        found = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        if found != shape:
            raise InputError(
                f"loss={type(self).__name__}: its weights have the shape {found}, not {shape}; "
                f"return (K steps, R anchors) from `weights`, and (R,) from `anchor_weights`"
            )
        return weights


def accept_length(alive: Num[Tensor, " K"], anchors: Num[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the joint accept length: 1 + the expected number of leading steps that are all right.

    The average is over all anchors, including those near the end of a turn: serving accepts nothing past it either.
    """
    return 1 + (alive / anchors).sum()
