"""The standard error of a number that was measured on few prompts.

Rounds and tokens of one answer are correlated, so prompts are the independent samples. Source: B. Efron and
C. Stein, The jackknife estimate of variance, Annals of Statistics 9 (1981).

Shapes: N prompts.
"""

import math

import numpy as np
from jaxtyping import Float


def left_out_ratios(
    numerators: Float[np.ndarray, " N"], denominators: Float[np.ndarray, " N"]
) -> Float[np.ndarray, " N"]:
    """Return a ratio of sums over prompts with each prompt left out in turn."""
    return (numerators.sum() - numerators) / (denominators.sum() - denominators)


def standard_error(left_out: Float[np.ndarray, " N"]) -> float:
    """Return the standard error of a number from its values with each prompt left out; infinite for fewer than two."""
    count = len(left_out)
    if count < 2:
        return math.inf
    return math.sqrt((count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum()))
