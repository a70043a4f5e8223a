"""Interface of kernels that attend over many segments in one call, without a score matrix.

Shapes: fast/__init__.py, but that R are any queries.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from eagle3.head.segments import Segments

OfQueries = Float[Tensor, "R Q C"]
OfTokens = Float[Tensor, "T G C"]
LogSumExp = Float[Tensor, "Q R"]
Gradients = tuple[OfQueries, OfTokens, OfTokens]


@runtime_checkable
class VarlenKernel(Protocol):
    """FlashAttention-2 (arXiv:2307.08691) of segments; query head q reads key/value head q // P."""

    def forward(self, query: OfQueries, key: OfTokens, value: OfTokens, where: Segments) -> tuple[OfQueries, LogSumExp]:
        """Return softmax(query · keyᵀ / √C) · value, and the log-sum-exp of the scores in float32 or wider.

        Queries of a segment without keys have finite outputs, and -inf for the log-sum-exp."""

    def backward(
        self,
        grad_output: OfQueries,
        query: OfQueries,
        key: OfTokens,
        value: OfTokens,
        output: OfQueries,
        logsumexp: LogSumExp,
        where: Segments,
    ) -> Gradients:
        """Return the gradients of query, key and value in new tensors; zero for keys that no query reads."""
