"""Accept lengths of heads on the same prompts, differences between two heads, and means over seeds, with their errors.

An accept length is a ratio of sums over prompts. Rounds of one answer and turns of one conversation are correlated, so
conversations are the independent samples. The standard error is the jackknife's (B. Efron and C. Stein, The jackknife
estimate of variance, Annals of Statistics 9, 1981): it is deterministic, needs no derivative, and pairs the two ratios
of a difference, because both leave out the same conversation. The interval assumes a normal distribution;
tests/decoding/test_paired.py measures how often it covers the truth.

Shapes: N prompts or other samples, C conversations.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


def left_out_ratios(
    numerators: Float[np.ndarray, " N"], denominators: Float[np.ndarray, " N"]
) -> Float[np.ndarray, " N"]:
    """Return a ratio of sums with each of the N left out in turn."""
    return (numerators.sum() - numerators) / (denominators.sum() - denominators)


def standard_error(left_out: Float[np.ndarray, " N"]) -> float:
    """Return the standard error of a number from its values with each of two or more samples left out."""
    count = len(left_out)
    assert count > 1
    return math.sqrt((count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum()))


class Estimate(NamedTuple):
    """A number measured on conversations or seeds, with its 95 % interval; None for fewer than two of them."""

    value: float
    standard_error: float | None
    low: float | None
    high: float | None


class Gains(NamedTuple):
    """Drafts accepted and verifications made on each prompt, and the number of its conversation."""

    accepted: Float[np.ndarray, " N"]
    verifications: Float[np.ndarray, " N"]
    conversations: Int[np.ndarray, " N"]

    @classmethod
    def of_rounds(cls, rounds: Sequence[Sequence[int]], conversations: Sequence[int]) -> "Gains":
        """Count the `rounds` of each prompt, which are the drafts that each of its verifications accepted."""
        accepted, verifications = (np.array([of(each) for each in rounds], float) for of in (sum, len))
        return cls(accepted, verifications, np.array(conversations))

    def of(self, prompts: np.ndarray) -> "Gains":
        return Gains(self.accepted[prompts], self.verifications[prompts], self.conversations[prompts])

    @property
    def accept_length(self) -> float:
        return 1 + float(self.accepted.sum() / self.verifications.sum())

    def left_out(self) -> Float[np.ndarray, " C"] | None:
        """Return the accept lengths without each of the conversations; None if there is only one."""
        _, numbers = np.unique(self.conversations, return_inverse=True)
        sums = [np.bincount(numbers, weights=values) for values in (self.accepted, self.verifications)]
        return 1 + left_out_ratios(*sums) if len(sums[0]) > 1 else None


def accept_length(gains: Gains) -> Estimate:
    drafted = gains.of(gains.verifications > 0)  # other prompts do not count in the ratio
    return _estimate(drafted.accept_length, drafted.left_out())


def difference(gains: Gains, first: Gains) -> Estimate:
    """Return the accept length minus that of `first` on the same prompts."""
    drafted = (gains.verifications > 0) & (first.verifications > 0)
    ours, theirs = gains.of(drafted), first.of(drafted)
    left_out, left_out_first = ours.left_out(), theirs.left_out()
    paired = None if left_out is None or left_out_first is None else left_out - left_out_first
    return _estimate(ours.accept_length - theirs.accept_length, paired)


def _estimate(value: float, left_out: Float[np.ndarray, " N"] | None) -> Estimate:
    if left_out is None:
        return Estimate(value, None, None, None)
    error = standard_error(left_out)
    return Estimate(value, error, value - Z * error, value + Z * error)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Return the mean of independent measurements with Student's t interval, which a single value has not.

    Needs the extra `bench`."""
    from scipy.stats import t as student

    mean, count = fmean(values), len(values)
    if count < 2:
        return Estimate(mean, None, None, None)
    error = stdev(values) / math.sqrt(count)
    half = error * float(student.ppf(0.5 + CONFIDENCE / 2, count - 1))
    return Estimate(mean, error, mean - half, mean + half)
