"""Accept lengths of heads on the same prompts, and the difference between two heads, with their standard errors.

An accept length is a ratio of sums over prompts. Rounds and tokens of one answer are correlated, so prompts are the
independent samples. The standard error is the jackknife's (B. Efron and C. Stein, The jackknife estimate of variance,
Annals of Statistics 9, 1981): it is deterministic, needs no derivative, and pairs the two ratios of a difference,
because both leave out the same prompt. The interval assumes a normal distribution; tests/decoding/test_paired.py
measures how often it covers the truth.

Shapes: N prompts.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


def left_out_ratios(
    numerators: Float[np.ndarray, " N"], denominators: Float[np.ndarray, " N"]
) -> Float[np.ndarray, " N"]:
    """Return a ratio of sums over prompts with each prompt left out in turn."""
    return (numerators.sum() - numerators) / (denominators.sum() - denominators)


def standard_error(left_out: Float[np.ndarray, " N"]) -> float:
    """Return the standard error of a number from its values with each of two or more prompts left out."""
    count = len(left_out)
    assert count > 1
    return math.sqrt((count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum()))


class Estimate(NamedTuple):
    """A number measured on prompts or seeds, with its 95 % interval; None for fewer than two of them."""

    value: float
    standard_error: float | None
    low: float | None
    high: float | None


class Gains(NamedTuple):
    """Drafts accepted and verifications made on each prompt."""

    accepted: Float[np.ndarray, " N"]
    verifications: Float[np.ndarray, " N"]

    def of(self, prompts: np.ndarray) -> "Gains":
        return Gains(self.accepted[prompts], self.verifications[prompts])

    @property
    def accept_length(self) -> float:
        return 1 + float(self.accepted.sum() / self.verifications.sum())

    def left_out(self) -> Float[np.ndarray, " N"]:
        """Return the accept lengths without each of the prompts."""
        return 1 + left_out_ratios(self.accepted, self.verifications)


def accept_length(gains: Gains) -> Estimate:
    drafted = gains.of(gains.verifications > 0)  # other prompts do not count in the ratio
    return _estimate(drafted.accept_length, drafted.left_out() if len(drafted.accepted) > 1 else None)


def difference(gains: Gains, first: Gains) -> Estimate:
    """Return the accept length minus that of `first` on the same prompts."""
    drafted = (gains.verifications > 0) & (first.verifications > 0)
    ours, theirs = gains.of(drafted), first.of(drafted)
    left_out = ours.left_out() - theirs.left_out() if drafted.sum() > 1 else None
    return _estimate(ours.accept_length - theirs.accept_length, left_out)


def _estimate(value: float, left_out: Float[np.ndarray, " N"] | None) -> Estimate:
    if left_out is None:
        return Estimate(value, None, None, None)
    error = standard_error(left_out)
    return Estimate(value, error, value - Z * error, value + Z * error)
