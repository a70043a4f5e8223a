"""Accept lengths of heads on the same prompts: of each, and of the difference between two, how sure it is.

An accept length is a ratio of sums over prompts, and prompts are what is drawn at random: rounds and tokens of one
answer are alike. Its standard error is the jackknife's (see jackknife.py), for all prompts at once: nothing in it is
random, it needs no derivative, and on a difference of two ratios it is paired, because both leave out the same prompt.
The interval is that of the normal distribution; tests/decoding/test_paired.py draws how often it holds the truth.

Shapes: N prompts.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


class Estimate(NamedTuple):
    """A number measured on prompts, with its interval of 95 %; None where there are fewer than two prompts."""

    value: float
    standard_error: float | None
    low: float | None
    high: float | None


class Gains(NamedTuple):
    """What drafting gained on each prompt: drafts accepted, and the verifications that it took."""

    accepted: Float[np.ndarray, " N"]
    verifications: Float[np.ndarray, " N"]

    def of(self, prompts: np.ndarray) -> "Gains":
        """Return those of some prompts, given by a mask."""
        return Gains(self.accepted[prompts], self.verifications[prompts])

    @property
    def accept_length(self) -> float:
        return 1 + float(self.accepted.sum() / self.verifications.sum())

    def left_out(self) -> Float[np.ndarray, " N"]:
        """Return the accept lengths without each of the prompts."""
        accepted, verifications = self.accepted.sum() - self.accepted, self.verifications.sum() - self.verifications
        return 1 + accepted / verifications


def accept_length(gains: Gains) -> Estimate:
    drafted = gains.of(gains.verifications > 0)  # the others have no part in the ratio
    return _estimate(drafted.accept_length, drafted.left_out() if len(drafted.accepted) > 1 else None)


def difference(gains: Gains, first: Gains) -> Estimate:
    """Return by how much the accept length is above that of `first`, on the same prompts."""
    drafted = (gains.verifications > 0) & (first.verifications > 0)
    ours, theirs = gains.of(drafted), first.of(drafted)
    left_out = ours.left_out() - theirs.left_out() if drafted.sum() > 1 else None
    return _estimate(ours.accept_length - theirs.accept_length, left_out)


def _estimate(value: float, left_out: Float[np.ndarray, " N"] | None) -> Estimate:
    if left_out is None:
        return Estimate(value, None, None, None)
    count = len(left_out)
    error = math.sqrt((count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum()))
    return Estimate(value, error, value - Z * error, value + Z * error)
