"""chain_keys.py in Triton. Its products are of vectors, which PyTorch runs as many small matrix products with copies of
all keys so far at every step; here each tensor is read or written once.

A program takes one anchor and one key/value head with its P queries. Equations are those of `ChainKeys`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.head.fast.chain_keys import ChainGradients, ChainKeys
from eagle3.head.fast.triton_jit import triton_jit

NUM_WARPS = 1  # a program holds a few hundred numbers


class TritonChainKeys(ChainKeys):
    """Launches the kernels below. Each chain length compiles its own kernel, with an unrolled loop over steps."""

    def merge(
        self, output: Tensor, logsumexp: Tensor, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        merged = torch.empty_like(query, memory_format=torch.contiguous_format)
        merged_logsumexp = torch.empty_like(logsumexp)
        assert output.is_contiguous() and logsumexp.is_contiguous()
        grid, sizes = _grid_and_sizes(query, keys, values)
        _merge_chain_keys[grid](
            output, logsumexp, query, tuple(keys), tuple(values), merged, merged_logsumexp, *sizes, num_warps=NUM_WARPS
        )
        return merged, merged_logsumexp

    def backward(
        self,
        grad_output: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        query: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        grad_query: Tensor,
    ) -> ChainGradients:
        grad_keys, grad_values = (
            [torch.empty_like(each, memory_format=torch.contiguous_format) for each in parts]
            for parts in (keys, values)
        )
        assert all(each.is_contiguous() for each in (grad_output, output, logsumexp, grad_query))
        grid, sizes = _grid_and_sizes(query, keys, values)
        _chain_keys_backward[grid](
            grad_output, output, logsumexp, query, tuple(keys), tuple(values), grad_query, tuple(grad_keys),
            tuple(grad_values), *sizes, num_warps=NUM_WARPS,
        )  # fmt: skip
        return grad_keys, grad_values


def _grid_and_sizes(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the grid, and what both kernels end with: R, strides, G, P, C, the powers of two that cover P and C."""
    groups, channels = keys[0].shape[1:]
    assert len({each.stride() for each in (*keys, *values)}) == 1
    assert query.stride()[1:] == keys[0].stride()[1:] == (channels, 1)
    of_group = query.shape[1] // groups
    blocks = triton.next_power_of_2(of_group), triton.next_power_of_2(channels)
    strides = query.stride(0), keys[0].stride(0)
    return (len(query), groups), (len(query), *strides, groups, of_group, channels, *blocks)


# The number of anchors differs from pack to pack and must not compile new kernels.
@triton_jit(do_not_specialize=["num_anchors"])
def _merge_chain_keys(
    # Pointers, or tuples of S pointers.
    output,  # [R, Q, C]
    logsumexp,  # [Q, R]
    query,  # [R, Q, C]
    keys,  # S of [R, G, C]
    values,  # S of [R, G, C]
    merged,  # [R, Q, C]
    merged_logsumexp,  # [Q, R]
    # Numbers; strides are between anchors.
    num_anchors,  # R
    query_stride,
    key_stride,
    # Constants.
    GROUPS: tl.constexpr,  # G
    OF_GROUP: tl.constexpr,  # P
    CHANNELS: tl.constexpr,  # C
    BLOCK_HEADS: tl.constexpr,  # the powers of two that cover P and C
    BLOCK_CHANNELS: tl.constexpr,
):
    anchor, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, channel = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_CHANNELS)
    inside = (head < OF_GROUP)[:, None] & (channel < CHANNELS)[None, :]
    heads = group * OF_GROUP + head
    place = heads[:, None] * CHANNELS + channel[None, :]
    of_anchor = anchor * GROUPS * OF_GROUP * CHANNELS + place
    of_key = anchor * key_stride + group * CHANNELS + channel
    q = tl.load(query + anchor * query_stride + place, inside, other=0).to(tl.float32) * (CHANNELS**-0.5)
    total = tl.load(output + of_anchor, inside, other=0).to(tl.float32)
    log_sum = tl.load(logsumexp + heads * num_anchors + anchor, head < OF_GROUP, other=0).to(tl.float32)
    for step in tl.static_range(len(keys)):
        key = tl.load(keys[step] + of_key, channel < CHANNELS, other=0).to(tl.float32)
        value = tl.load(values[step] + of_key, channel < CHANNELS, other=0).to(tl.float32)
        score = tl.sum(q * key[None, :], 1)
        # log(exp(a) + exp(b)) over the larger of both, so that no exponential overflows.
        highest = tl.maximum(log_sum, score)
        more = highest + tl.log(tl.exp(log_sum - highest) + tl.exp(score - highest))
        total = total * tl.exp(log_sum - more)[:, None] + tl.exp(score - more)[:, None] * value[None, :]
        log_sum = more
    tl.store(merged + of_anchor, total.to(merged.dtype.element_ty), inside)
    log_sum = log_sum.to(merged_logsumexp.dtype.element_ty)
    tl.store(merged_logsumexp + heads * num_anchors + anchor, log_sum, head < OF_GROUP)


@triton_jit(do_not_specialize=["num_anchors"])
def _chain_keys_backward(
    # Pointers, or tuples of S pointers.
    grad_output,  # [R, Q, C]
    output,  # [R, Q, C], merged
    logsumexp,  # [Q, R], merged
    query,  # [R, Q, C]
    keys,  # S of [R, G, C]
    values,  # S of [R, G, C]
    grad_query,  # [R, Q, C], added to
    grad_keys,  # S of [R, G, C]
    grad_values,  # S of [R, G, C]
    # Numbers; strides are between anchors.
    num_anchors,  # R
    query_stride,
    key_stride,
    # Constants.
    GROUPS: tl.constexpr,  # G
    OF_GROUP: tl.constexpr,  # P
    CHANNELS: tl.constexpr,  # C
    BLOCK_HEADS: tl.constexpr,  # the powers of two that cover P and C
    BLOCK_CHANNELS: tl.constexpr,
):
    anchor, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, channel = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_CHANNELS)
    inside = (head < OF_GROUP)[:, None] & (channel < CHANNELS)[None, :]
    heads = group * OF_GROUP + head
    place = heads[:, None] * CHANNELS + channel[None, :]
    of_anchor = anchor * GROUPS * OF_GROUP * CHANNELS + place
    of_key = anchor * key_stride + group * CHANNELS + channel
    of_grad = (anchor * GROUPS + group) * CHANNELS + channel
    q = tl.load(query + anchor * query_stride + place, inside, other=0).to(tl.float32)
    gradient = tl.load(grad_output + of_anchor, inside, other=0).to(tl.float32)
    mean = tl.sum(gradient * tl.load(output + of_anchor, inside, other=0).to(tl.float32), 1)
    # Heads that are padding get no weight.
    log_sum = tl.load(logsumexp + heads * num_anchors + anchor, head < OF_GROUP, other=float("inf")).to(tl.float32)
    grad_q = tl.load(grad_query + of_anchor, inside, other=0).to(tl.float32)
    for step in tl.static_range(len(keys)):
        key = tl.load(keys[step] + of_key, channel < CHANNELS, other=0).to(tl.float32)
        value = tl.load(values[step] + of_key, channel < CHANNELS, other=0).to(tl.float32)
        weight = tl.exp(tl.sum(q * key[None, :], 1) * (CHANNELS**-0.5) - log_sum)
        grad_score = weight * (tl.sum(gradient * value[None, :], 1) - mean) * (CHANNELS**-0.5)
        grad_q += grad_score[:, None] * key[None, :]
        grad_key, grad_value = tl.sum(grad_score[:, None] * q, 0), tl.sum(weight[:, None] * gradient, 0)
        tl.store(grad_keys[step] + of_grad, grad_key.to(grad_keys[step].dtype.element_ty), channel < CHANNELS)
        tl.store(grad_values[step] + of_grad, grad_value.to(grad_values[step].dtype.element_ty), channel < CHANNELS)
    tl.store(grad_query + of_anchor, grad_q.to(grad_query.dtype.element_ty), inside)
