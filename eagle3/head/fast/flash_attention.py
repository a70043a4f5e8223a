"""Attention of the unroll without a score matrix, on kernels that also return the log-sum-exp of the scores.

The softmax over everything that an anchor attends to is merged from parts, by the log-sum-exp of each:

1. The span of its turn, in one causal call, then those of earlier turns, in a few more (segments.py).
2. The keys of its chain (chain_keys.py, which has the equations of the merge).

The backward of a part needs only the *merged* output and log-sum-exp. FlashAttention-2 computes p = exp(score -
logsumexp) and dscore = p (dp - sum(doutput * output)) (arXiv:2307.08691, algorithm 2); with the merged values these
belong to the softmax over all parts. So the backward of a flash kernel that is given them is exact.

Shapes: fast/__init__.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.head.attention import KeysValues
from eagle3.head.batch import TttBatch
from eagle3.head.fast.chain_keys import ChainKeys
from eagle3.head.fast.varlen_kernel import LogSumExp, OfQueries, OfTokens, VarlenKernel
from eagle3.head.segments import Segments


class FlashAttention:
    def __init__(self, context: KeysValues, batch: TttBatch, *, kernel: VarlenKernel, chain_keys: ChainKeys) -> None:
        self.context, self.kernel, self.chain_keys = context, kernel, chain_keys
        self.segments = batch.segments

    def __call__(self, query: OfQueries, chain: list[KeysValues]) -> OfQueries:
        keys, values = [key for key, _ in chain], [value for _, value in chain]
        kernels = self.kernel, self.chain_keys
        return _Attend.apply(query, *self.context, *kernels, self.segments, *keys, *values)


class _Attend(torch.autograd.Function):
    """Attends to the turn itself, to the levels of earlier turns, and to the chain: all its keys, then its values."""

    @staticmethod
    def forward(
        ctx: Any,
        query: OfQueries,
        key: OfTokens,
        value: OfTokens,
        kernel: VarlenKernel,
        chain_keys: ChainKeys,
        segments: tuple[Segments, ...],
        *chain: Float[Tensor, "R G C"],
    ) -> OfQueries:
        same_turn, *earlier_turns = segments
        output, logsumexp = kernel.forward(query, key, value, same_turn)  # (R, Q, C), (Q, R)
        if earlier_turns:
            output = output.to(logsumexp.dtype)  # rounded once, after the last part
        for where in earlier_turns:
            _add_part(output, logsumexp, *kernel.forward(query, key, value, where))
        if chain:
            output, logsumexp = chain_keys.merge(output, logsumexp, query, *_halves(chain))
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp, *chain)
        ctx.kernel, ctx.chain_keys, ctx.segments = kernel, chain_keys, segments
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: OfQueries) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp, *chain = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        given = grad_output, query, key, value, output, logsumexp
        grad_query, grad_key, grad_value = ctx.kernel.backward(*given, ctx.segments[0])
        for where in ctx.segments[1:]:
            parts = ctx.kernel.backward(*given, where)
            for total, part in zip((grad_query, grad_key, grad_value), parts, strict=True):
                total += part
        grad_chain: list[Tensor] = []
        if chain:
            grad_keys, grad_values = ctx.chain_keys.backward(
                grad_output, output, logsumexp, query, *_halves(chain), grad_query
            )
            grad_chain = [*grad_keys, *grad_values]
        return grad_query, grad_key, grad_value, None, None, None, *grad_chain


def _add_part(output: OfQueries, logsumexp: LogSumExp, part: OfQueries, part_logsumexp: LogSumExp) -> None:
    """Merge one more part into output and log-sum-exp, in place."""
    merged = torch.logaddexp(logsumexp, part_logsumexp)
    kept, added = ((each - merged).exp().T[..., None] for each in (logsumexp, part_logsumexp))
    output.mul_(kept).add_(part * added)
    logsumexp.copy_(merged)


def _halves(chain: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    steps = len(chain) // 2
    return chain[:steps], chain[steps:]
