"""Attention of the unroll without a score matrix, on kernels that also return the log-sum-exp of the scores.

The softmax over everything that an anchor attends to is merged from parts, by the log-sum-exp of each:

1. The span of its turn: the tokens from the end of the sample's previous turn up to the anchor. One causal call for the
   pack.
2. The spans of all earlier turns. The turns of a sample are halved recursively; at each level the anchors of the right
   halves attend to the tokens of the left halves: ceil(log2(turns)) calls, and none for samples of one turn. Keys stay
   in place in the pack: gathering each turn's keys would cost memory for turns x tokens.
3. The keys of its chain (chain_keys.py, which has the equations of the merge).

The backward of a part needs only the *merged* output and log-sum-exp. FlashAttention-2 computes p = exp(score -
logsumexp) and dscore = p (dp - sum(doutput * output)) (arXiv:2307.08691, algorithm 2); with the merged values these
belong to the softmax over all parts. So the backward of a flash kernel that is given them is exact.

Shapes: fast/__init__.py; r anchors of one level.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3.head.attention import KeysValues
from eagle3.head.batch import TttBatch
from eagle3.head.fast.chain_keys import ChainKeyKernels
from eagle3.head.fast.flash_kernels import Segments, VarlenKernel

Range = tuple[int, int]  # the first, and one past the last


@dataclass(frozen=True)
class EarlierTurns:
    """One level of the halving: the anchors, as indices in R, and the segments that they attend to."""

    anchors: Int[Tensor, " r"]
    where: Segments


class FlashAttention:
    def __init__(
        self, context: KeysValues, batch: TttBatch, *, kernel: VarlenKernel, chain_keys: ChainKeyKernels
    ) -> None:
        self.context, self.kernel, self.chain_keys = context, kernel, chain_keys
        num_tokens, device = len(batch.pack.input_ids), batch.anchors.device
        turns_of_samples = _turns_of_samples(batch)
        stretches = [turn for turns in turns_of_samples for turn in turns]
        self.same_turn = _segments(stretches, num_tokens, device, causal=True)
        levels: list[list[tuple[Range, Range]]] = []
        for turns in turns_of_samples:
            _halve(turns, levels)
        self.levels = [
            EarlierTurns(
                torch.cat([torch.arange(*anchors) for anchors, _ in level]).to(device, non_blocking=True),
                _segments(level, num_tokens, device, causal=False),
            )
            for level in levels
        ]

    def __call__(self, query: Float[Tensor, "R Q C"], chain: list[KeysValues]) -> Float[Tensor, "R Q C"]:
        keys, values = [key for key, _ in chain], [value for _, value in chain]
        kernels = self.kernel, self.chain_keys
        return _Attend.apply(query, *self.context, *kernels, self.same_turn, self.levels, *keys, *values)


class _Attend(torch.autograd.Function):
    """Attends to the turn itself, to the levels of earlier turns, and to the chain: all its keys, then its values."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "R Q C"],
        key: Float[Tensor, "T G C"],
        value: Float[Tensor, "T G C"],
        kernel: VarlenKernel,
        chain_keys: ChainKeyKernels,
        same_turn: Segments,
        levels: list[EarlierTurns],
        *chain: Float[Tensor, "R G C"],
    ) -> Float[Tensor, "R Q C"]:
        output, logsumexp = kernel.forward(query, key, value, same_turn)  # (R, Q, C), (Q, R)
        if levels:
            output = output.to(logsumexp.dtype)  # rounded once, after the last part
        for level in levels:
            part = kernel.forward(query.index_select(0, level.anchors), key, value, level.where)
            _add_part(output, logsumexp, level.anchors, *part)
        if chain:
            output, logsumexp = chain_keys.merge(output, logsumexp, query, *_halves(chain))
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp, *chain)
        ctx.kernel, ctx.chain_keys, ctx.same_turn, ctx.levels = kernel, chain_keys, same_turn, levels
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Float[Tensor, "R Q C"]) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp, *chain = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_query, grad_key, grad_value = ctx.kernel.backward(
            grad_output, query, key, value, output, logsumexp, ctx.same_turn
        )
        for level in ctx.levels:
            anchors = level.anchors
            some_grad, some_query, some_output = (x.index_select(0, anchors) for x in (grad_output, query, output))
            query_part, key_part, value_part = ctx.kernel.backward(
                some_grad, some_query, key, value, some_output, logsumexp.index_select(1, anchors), level.where
            )
            grad_query.index_add_(0, anchors, query_part)
            grad_key += key_part
            grad_value += value_part
        grad_chain: list[Tensor] = []
        if chain:
            grad_keys, grad_values = ctx.chain_keys.backward(
                grad_output, output, logsumexp, query, *_halves(chain), grad_query
            )
            grad_chain = [*grad_keys, *grad_values]
        return grad_query, grad_key, grad_value, None, None, None, None, *grad_chain


def _add_part(
    output: Float[Tensor, "R Q C"],
    logsumexp: Float[Tensor, "Q R"],
    anchors: Int[Tensor, " r"],
    part: Float[Tensor, "r Q C"],
    part_logsumexp: Float[Tensor, "Q r"],
) -> None:
    """Merge one more part of some anchors into output and log-sum-exp, in place."""
    before = logsumexp.index_select(1, anchors)
    after = torch.logaddexp(before, part_logsumexp)
    kept, added = ((each - after).exp().T[..., None] for each in (before, part_logsumexp))
    output.index_copy_(0, anchors, output.index_select(0, anchors) * kept + part * added)
    logsumexp.index_copy_(1, anchors, after)


def _halves(chain: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the keys and the values of a chain."""
    steps = len(chain) // 2
    return chain[:steps], chain[steps:]


def _turns_of_samples(batch: TttBatch) -> list[list[tuple[Range, Range]]]:
    """Return each sample's turns: the anchors, and the span, which are the tokens since the previous turn."""
    turns_of_samples: list[list[tuple[Range, Range]]] = [[] for _ in batch.pack.sample_ids]
    sample, start = 0, 0
    for anchors, stop in zip(pairwise(batch.turn_bounds), batch.turn_ends, strict=True):
        while stop > batch.pack.token_bounds[sample + 1]:
            sample += 1
            start = batch.pack.token_bounds[sample]
        turns_of_samples[sample].append((anchors, (start, stop)))
        start = stop
    return turns_of_samples


def _halve(turns: list[tuple[Range, Range]], levels: list[list[tuple[Range, Range]]], depth: int = 0) -> None:
    """Add to each level the anchors of a right half, and the tokens of the left half that they attend to."""
    if len(turns) < 2:
        return
    left, right = turns[: len(turns) // 2], turns[len(turns) // 2 :]
    if depth == len(levels):
        levels.append([])
    anchors, tokens = (right[0][0][0], right[-1][0][1]), (left[0][1][0], left[-1][1][1])
    levels[depth].append((anchors, tokens))
    _halve(left, levels, depth + 1)
    _halve(right, levels, depth + 1)


def _segments(reads: list[tuple[Range, Range]], num_tokens: int, device: torch.device, *, causal: bool) -> Segments:
    """Return consecutive segments of anchors over all tokens; tokens that no anchor attends to have no queries."""
    query_bounds, key_bounds = [0], [0]
    for (first_anchor, anchor_stop), (first_token, token_stop) in [*reads, ((0, 0), (num_tokens, num_tokens))]:
        if first_token > key_bounds[-1]:
            query_bounds.append(query_bounds[-1])
            key_bounds.append(first_token)
        if token_stop > first_token:
            query_bounds.append(query_bounds[-1] + anchor_stop - first_anchor)
            key_bounds.append(token_stop)
    bounds = torch.tensor([query_bounds, key_bounds], dtype=torch.int32)
    most_queries, most_keys = bounds.diff().amax(1).tolist()
    on_device = bounds.to(device, non_blocking=True)
    return Segments(
        query_bounds=on_device[0],
        key_bounds=on_device[1],
        most_queries=most_queries,
        most_keys=most_keys,
        causal=causal,
    )
