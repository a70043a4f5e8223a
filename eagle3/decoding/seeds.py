"""Means of independent measurements, such as trainings with several seeds. Needs the extra `bench`."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.stats import t as student

from eagle3.decoding.paired import CONFIDENCE, Estimate


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's t interval, which a single value has not."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return Estimate(mean, None, None, None)
    error = stdev(values) / math.sqrt(count)
    half = error * float(student.ppf(0.5 + CONFIDENCE / 2, count - 1))
    return Estimate(mean, error, mean - half, mean + half)
