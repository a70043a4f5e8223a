"""The divergences that the project ships, and one of a function of your own, for tests that go over all of them."""

import pytest
from torch import Tensor

from eagle3.head.divergence import SOFT_CROSS_ENTROPY, CrossEntropyTv, NegativeLogAcceptance, PlainDivergence


def reverse_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(q ‖ p) of logits, as a user would write it."""
    log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


OF_FUNCTION = PlainDivergence(function="divergences.reverse_kl")
DIVERGENCES = [SOFT_CROSS_ENTROPY, CrossEntropyTv(tv_weight=0.3), NegativeLogAcceptance(), OF_FUNCTION]
BY_NAME = {type(each).__name__: each for each in DIVERGENCES}
each_divergence = pytest.mark.parametrize("divergence", BY_NAME.values(), ids=BY_NAME)
