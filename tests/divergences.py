"""The divergences that the project ships, for tests that go over all of them."""

import pytest

from eagle3.head.divergence import SOFT_CROSS_ENTROPY, CrossEntropyTv, NegativeLogAcceptance

DIVERGENCES = [SOFT_CROSS_ENTROPY, CrossEntropyTv(tv_weight=0.3), NegativeLogAcceptance()]
BY_NAME = {type(each).__name__: each for each in DIVERGENCES}
each_divergence = pytest.mark.parametrize("divergence", BY_NAME.values(), ids=BY_NAME)
