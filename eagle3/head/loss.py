"""The loss of the unroll and its metrics, in plain PyTorch.

Loss of a row: cross-entropy of the draft against the teacher's softmax restricted to and renormalised on the draft
vocabulary. Rows whose teacher argmax is outside the draft vocabulary carry no loss and count as wrong.

Shapes: R trained rows, J teacher rows, H hidden size, D draft vocabulary, K steps.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.errors import InputError
from eagle3.head.batch import TttBatch
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.draft_vocab import membership


@dataclass(frozen=True)
class UnrollMetrics:
    """Sums over rows, so that packs and ranks can be added: divide by `rows` (or `trained` for per-step accuracy).

    `gained` alone is not summed."""

    rows: Int[Tensor, ""]
    trained: Int[Tensor, " K"]  # rows trained at the step
    correct: Int[Tensor, " K"]  # of those, draft argmax = teacher argmax
    alive: Int[Tensor, " K"]  # of all rows, correct at this and every earlier step
    gained: Int[Tensor, " R"]  # of each row: the leading steps that are correct

    def as_tensor(self) -> Float[Tensor, " 3K+1"]:
        return torch.cat([self.rows[None], self.trained, self.correct, self.alive]).double()


@dataclass(frozen=True, kw_only=True)
class UnrollLoss:
    """Sum over steps of decay^k times the rows' losses.

    normalize="token" divides by the trained rows of the whole optimizer step, "sequence" gives every sample the same
    weight. Neither knows padding or prompt rows.
    """

    decay: float
    normalize: str

    def __post_init__(self) -> None:
        if self.normalize not in ("token", "sequence"):
            raise InputError(f"loss.normalize={self.normalize} is unknown; pick loss.normalize=token or sequence")
        if self.decay <= 0:
            raise InputError(f"loss.decay={self.decay} must be positive, e.g. loss.decay=0.8")

    def require(self, *, device: torch.device, precision: str, config: HeadConfig) -> None:
        """InputError where this run cannot compute the loss; `precision` is the trainer's."""

    def __call__(
        self, head: DraftHead, hidden: list[Float[Tensor, "R H"]], teacher_head: Float[Tensor, "D H"], batch: TttBatch
    ) -> tuple[Float[Tensor, ""], UnrollMetrics]:
        with torch.autocast(
            batch.pack.last_hidden_state.device.type, enabled=False
        ):  # bf16 logits would blur close teacher tokens
            wide = torch.promote_types(teacher_head.dtype, torch.float32)
            teachers = (batch.pack.last_hidden_state.to(wide) @ teacher_head.to(wide).T).softmax(-1)  # (J, D)
        in_vocabulary = membership(head.draft_ids, head.config.vocab_size)[batch.pack.teacher_argmax]
        weight = self._row_weight(batch)
        alive, gained = torch.ones_like(batch.anchors, dtype=torch.bool), torch.zeros_like(batch.anchors)
        loss = teachers.new_zeros(())
        trained_counts, correct_counts, alive_counts = [], [], []
        for step, output in enumerate(hidden):
            trained = batch.anchor_steps > step
            teacher = batch.pack.teacher_index[(batch.anchors + 1 + step).clamp(max=len(batch.pack.teacher_index) - 1)]
            logits = head.logits(output).to(teachers.dtype)
            counted = trained & in_vocabulary[teacher]
            row_loss = soft_cross_entropy(logits, teachers[teacher])
            loss = loss + self.decay**step * (row_loss * weight * counted).sum()
            correct = trained & (head.draft_ids[logits.argmax(-1)] == batch.pack.teacher_argmax[teacher])
            alive = alive & correct
            gained = gained + alive
            trained_counts.append(trained.sum())
            correct_counts.append(correct.sum())
            alive_counts.append(alive.sum())
        rows = torch.tensor(len(batch.anchors), device=loss.device)
        return loss, UnrollMetrics(
            rows, torch.stack(trained_counts), torch.stack(correct_counts), torch.stack(alive_counts), gained
        )

    def _row_weight(self, batch: TttBatch) -> Tensor:
        if self.normalize == "token":
            return torch.full_like(batch.anchors, 1 / batch.pack.anchors_in_step, dtype=torch.float32)
        return 1 / (batch.anchors_of_sample * batch.pack.samples_in_step)


def soft_cross_entropy(logits: Float[Tensor, "R D"], teacher: Float[Tensor, "R D"]) -> Float[Tensor, " R"]:
    """Of the draft's logits against the teacher's probabilities."""
    return logits.logsumexp(-1) - (teacher * logits).sum(-1)


def accept_length(alive: Float[Tensor, " K"], rows: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Joint accept length: 1 + the expected number of leading steps that are all right.

    Averaged over every chain start, rows near the end of a turn included: serving accepts nothing past it either.
    """
    return 1 + (alive / rows).sum()
