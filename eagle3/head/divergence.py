"""Divergences of the draft's distribution from the target's, which a loss sums over anchors and steps.

Each has a value, which the plain loss differentiates by autograd, and a gradient, which the chunked loss writes over
the logits (tests/head/test_divergence.py compares the two). Ours have it written by hand; a function of your own
(`PlainDivergence`) is differentiated. q is the draft's distribution, p the target's, both over the draft vocabulary.

Shapes: M rows, D draft vocabulary.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3.errors import InputError, first_line
from eagle3.settings.parts import imported
from eagle3.settings.training import FunctionSettings, TvSettings

log = logging.getLogger(__name__)

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

    def slopes(self, draft: Logits, target: Logits) -> Logits:
        """Differentiate `rows` by autograd; a class that knows its derivative saves memory and time."""
        with torch.inference_mode(False), torch.enable_grad():  # clones: of validation, tensors have no gradients
            draft = draft.clone().requires_grad_()
            return torch.autograd.grad(self.rows(draft, target.clone()).sum(), draft)[0]

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


@dataclass(frozen=True, kw_only=True)
class PlainDivergence(FunctionSettings):
    """A function of the logits of draft and target, both (M, D), that returns a value for each row.

    Autograd differentiates it, in the chunked loss once for each chunk."""

    def __post_init__(self) -> None:
        _ = self.of_logits  # what cannot be imported is refused when the loss is built

    @cached_property
    def of_logits(self) -> Callable[[Logits, Logits], PerRow]:
        found = imported(self.function, FUNCTION)
        if not callable(found):
            raise InputError(f"{FUNCTION}={self.function} is no function; give one of the logits of draft and target")
        return found

    def of_target(self, logits: Logits) -> Logits:
        return logits

    def value(self, logits: Logits, log_sum: PerRow, target: Logits) -> Tensor:  # its shape is verified at the start
        return self.of_logits(logits, target)

    def gradient(self, logits: Logits, log_sum: PerRow, target: Logits) -> Logits:
        with torch.inference_mode(False), torch.enable_grad():  # clones, as in `slopes`
            logits = logits.clone().requires_grad_()
            return torch.autograd.grad(self.of_logits(logits, target.clone()).sum(), logits)[0]


SOFT_CROSS_ENTROPY = SoftCrossEntropy()
FUNCTION = "loss.divergence.function"
SPREADS = (0.5, 1.0, 1.5, 2.0)  # of the logits in each row that `require_consistent` draws
TOLERANCE = 1e-3  # relative to the largest component, in float32


def require_consistent(divergence: Divergence, vocab_size: int, device: torch.device, *, uses_gradient: bool) -> None:
    """Raise InputError if a divergence of the user's own has another gradient than autograd finds for its value.

    A few random rows show it. The project's own classes have tests for that."""
    name, plain = f"loss.divergence={type(divergence).__name__}", isinstance(divergence, PlainDivergence)
    if isinstance(divergence, PlainDivergence):
        name = f"{FUNCTION}={divergence.function}"
    elif type(divergence).__module__.startswith("eagle3."):
        return
    needed = ("of_target", "value", *(["gradient"] if uses_gradient else []))
    if missing := [method for method in needed if not hasattr(divergence, method)]:
        raise InputError(f"{name} has no method {' and '.join(missing)}; derive it from OfLogProbabilities")
    spread = torch.tensor(SPREADS)[:, None]
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(len(SPREADS), vocab_size, generator=generator) * spread for _ in range(2))
    logits, target_logits = (each.to(device) for each in rows)
    with torch.enable_grad():
        logits.requires_grad_()
        target = divergence.of_target(target_logits)
        try:
            value = divergence.value(logits, logits.logsumexp(-1), target)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            raise InputError(
                f"{name} fails for {list(logits.shape)} logits of draft and target ({first_line(error)}); correct it"
            ) from error
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != [len(SPREADS)]:
            raise InputError(
                f"{name} has a value of shape {shape} for {list(logits.shape)} logits; return one value "
                f"per row, e.g. a sum over the last dimension"
            )
        if value.isnan().any():
            raise InputError(f"{name} is nan for random logits of draft and target; correct it, e.g. 0 · log 0")
        if plain and not value.requires_grad:
            raise InputError(
                f"{name} has a value that autograd cannot differentiate by its first argument, the draft's logits; "
                f"compute it without detach(), argmax or no_grad()"
            )
        if plain or not uses_gradient:  # the gradient is autograd's own
            return
        if not value.requires_grad:
            log.warning("%s has a value that autograd cannot differentiate: its gradient is not verified", name)
            return
        [expected] = torch.autograd.grad(value.sum(), logits)
    with torch.no_grad():
        try:
            found = divergence.gradient(logits.detach().clone(), logits.logsumexp(-1), target.detach())
        except NotImplementedError:
            raise InputError(
                f"{name} has no derivative; leave out `slopes`: autograd then differentiates `rows`"
            ) from None
    differences, largest = (found - expected).abs().amax(-1), expected.abs().amax(-1)
    # A value that is too large to differentiate says nothing; a difference that is nan is wrong.
    wrong = largest.isfinite() & ~(differences <= TOLERANCE * largest)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise InputError(
            f"{name} has another gradient than the derivative of its value: in row {row} of {len(SPREADS)} random ones "
            f"it differs by {float(differences[row]):.2g}, where the largest component is {float(largest[row]):.2g}; "
            f"correct `slopes`, or leave it out: autograd then differentiates `rows`"
        )
