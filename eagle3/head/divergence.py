"""Divergences of the draft's distribution from the target's, which a loss sums over anchors and steps.

Each has a value, which the plain loss differentiates by autograd, and a gradient, which the chunked loss writes over
the logits (tests/head/test_divergence.py compares the two). q is the draft's distribution, p the
target's, both over the draft vocabulary.

Shapes: M rows, D draft vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.settings.training import TvSettings

Logits = Float[Tensor, "M D"]  # and what is computed from them: probabilities, gradients
PerRow = Float[Tensor, " M"]


@runtime_checkable
class Divergence(Protocol):
    """`log_sum` is `logits.logsumexp(-1)`: `logits - log_sum` are the draft's log-probabilities."""

    def of_target(self, logits: Logits) -> Logits:
        """Return the `target` of the other methods, once for all draft rows with the same target row."""

    def value(self, logits: Logits, log_sum: PerRow, target: Logits) -> PerRow: ...

    def gradient(self, logits: Logits, log_sum: PerRow, target: Logits) -> Logits:
        """Return the gradient of each row's value with respect to its logits, which may be overwritten."""


@dataclass(frozen=True)
class SoftCrossEntropy:
    """-Σ p log q: forward KL, KL(p ‖ q), plus the target's entropy, which is constant.

    `target` is p itself: one exponential per target row, and none for the value.
    """

    def of_target(self, logits: Logits) -> Logits:
        return logits.softmax(-1)

    def value(self, logits: Logits, log_sum: PerRow, target: Logits) -> PerRow:
        return log_sum - torch.linalg.vecdot(target, logits)

    def gradient(self, logits: Logits, log_sum: PerRow, target: Logits) -> Logits:
        return logits.sub_(log_sum[:, None]).exp_().sub_(target)


class OfLogProbabilities(ABC):
    """A divergence defined by two functions of log q and log p: `rows`, and `slopes`, its derivative by log q."""

    @abstractmethod
    def rows(self, draft: Logits, target: Logits) -> PerRow: ...

    @abstractmethod
    def slopes(self, draft: Logits, target: Logits) -> Logits: ...

    def of_target(self, logits: Logits) -> Logits:
        return logits.log_softmax(-1)

    def value(self, logits: Logits, log_sum: PerRow, target: Logits) -> PerRow:
        return self.rows(logits - log_sum[:, None], target)

    def gradient(self, logits: Logits, log_sum: PerRow, target: Logits) -> Logits:
        draft = logits.sub_(log_sum[:, None])
        slopes = self.slopes(draft, target)
        return slopes.sub_(draft.exp_().mul_(slopes.sum(-1, keepdim=True)))  # a logit moves all of log q


@dataclass(frozen=True, kw_only=True)
class CrossEntropyTv(TvSettings, OfLogProbabilities):
    """(1 - w) · soft cross-entropy + w · total variation.

    Total variation is ½ Σ |q - p| = 1 - Σ min(p, q): the chance that sampling rejects the draft's token
    (arXiv:2211.17192).
    """

    def rows(self, draft: Logits, target: Logits) -> PerRow:
        cross_entropy = -torch.linalg.vecdot(target.exp(), draft)
        total_variation = (draft.exp() - target.exp()).abs().sum(-1) / 2
        return (1 - self.tv_weight) * cross_entropy + self.tv_weight * total_variation

    def slopes(self, draft: Logits, target: Logits) -> Logits:
        total_variation = (draft - target).sign() * draft.exp() / 2
        return self.tv_weight * total_variation - (1 - self.tv_weight) * target.exp()


@dataclass(frozen=True)
class NegativeLogAcceptance(OfLogProbabilities):
    """-log Σ min(p, q): the LK loss without a parameter (arXiv:2602.23881).

    Its gradient is that of total variation, divided by the sum. It is computed in log space, so a draft that shares
    nothing with a sharp target has a finite loss.
    """

    def rows(self, draft: Logits, target: Logits) -> PerRow:
        return -torch.minimum(draft, target).logsumexp(-1)

    def slopes(self, draft: Logits, target: Logits) -> Logits:
        # The derivative of min by log q is 1 below log p, 0 above, and one half at equality.
        return torch.minimum(draft, target).softmax(-1) * ((draft - target).sign() - 1) / 2


SOFT_CROSS_ENTROPY = SoftCrossEntropy()
