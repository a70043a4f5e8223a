"""own_keys.py in Triton. Its products are of vectors: PyTorch turns them into many small matrix products and copies of
all keys so far, at every step; here each tensor is read or written once.

Shapes: as in own_keys.py.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

NUM_WARPS = 1  # a program holds a few hundred numbers


def add_own_keys(
    output: Float[Tensor, "R Q C"],
    logsumexp: Float[Tensor, "Q R"],
    query: Float[Tensor, "R Q C"],
    keys: Sequence[Float[Tensor, "R G C"]],
    values: Sequence[Float[Tensor, "R G C"]],
) -> tuple[Float[Tensor, "R Q C"], Float[Tensor, "Q R"]]:
    merged = torch.empty_like(query, memory_format=torch.contiguous_format)
    after = torch.empty_like(logsumexp)
    assert output.is_contiguous() and logsumexp.is_contiguous()
    grid, sizes = _grid_and_sizes(query, keys, values)
    _add_own_keys[grid](
        output, logsumexp, query, tuple(keys), tuple(values), merged, after, len(query), query.stride(0),
        keys[0].stride(0), *sizes, num_warps=NUM_WARPS,
    )  # fmt: skip
    return merged, after


def own_keys_backward(
    grad_output: Float[Tensor, "R Q C"],
    output: Float[Tensor, "R Q C"],
    logsumexp: Float[Tensor, "Q R"],
    query: Float[Tensor, "R Q C"],
    keys: Sequence[Float[Tensor, "R G C"]],
    values: Sequence[Float[Tensor, "R G C"]],
    grad_query: Float[Tensor, "R Q C"],
) -> tuple[list[Float[Tensor, "R G C"]], list[Float[Tensor, "R G C"]]]:
    grad_keys, grad_values = (
        [torch.empty_like(each, memory_format=torch.contiguous_format) for each in parts] for parts in (keys, values)
    )
    assert all(each.is_contiguous() for each in (grad_output, output, logsumexp, grad_query))
    grid, sizes = _grid_and_sizes(query, keys, values)
    _own_keys_backward[grid](
        grad_output, output, logsumexp, query, tuple(keys), tuple(values), grad_query, tuple(grad_keys),
        tuple(grad_values), len(query), query.stride(0), keys[0].stride(0), *sizes, num_warps=NUM_WARPS,
    )  # fmt: skip
    return grad_keys, grad_values


def _grid_and_sizes(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """A program for each row and key/value head; then groups, queries of a group, channels, and their powers of two."""
    groups, channels = keys[0].shape[1:]
    own = {each.stride() for each in (*keys, *values)}
    assert len(own) == 1 and query.stride()[1:] == keys[0].stride()[1:] == (channels, 1)
    of_group = query.shape[1] // groups
    sizes = (groups, of_group, channels, triton.next_power_of_2(of_group), triton.next_power_of_2(channels))
    return (len(query), groups), sizes


# The number of rows differs from pack to pack: it must not make new kernels.
@triton.jit(do_not_specialize=["num_rows"])
def _add_own_keys(
    output,
    logsumexp,
    query,
    keys,
    values,
    merged,
    after,
    num_rows,
    query_stride,
    key_stride,
    GROUPS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, channel = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_CHANNELS)
    inside = (head < OF_GROUP)[:, None] & (channel < CHANNELS)[None, :]
    heads = group * OF_GROUP + head
    place = heads[:, None] * CHANNELS + channel[None, :]
    of_row = row * GROUPS * OF_GROUP * CHANNELS + place
    of_key = row * key_stride + group * CHANNELS + channel
    q = tl.load(query + row * query_stride + place, inside, other=0).to(tl.float32) * (CHANNELS**-0.5)
    total = tl.load(output + of_row, inside, other=0).to(tl.float32)
    log_sum = tl.load(logsumexp + heads * num_rows + row, head < OF_GROUP, other=0).to(tl.float32)
    for step in tl.static_range(len(keys)):
        key = tl.load(keys[step] + of_key, channel < CHANNELS, other=0).to(tl.float32)
        value = tl.load(values[step] + of_key, channel < CHANNELS, other=0).to(tl.float32)
        score = tl.sum(q * key[None, :], 1)
        highest = tl.maximum(log_sum, score)
        more = highest + tl.log(tl.exp(log_sum - highest) + tl.exp(score - highest))
        total = total * tl.exp(log_sum - more)[:, None] + tl.exp(score - more)[:, None] * value[None, :]
        log_sum = more
    tl.store(merged + of_row, total.to(merged.dtype.element_ty), inside)
    tl.store(after + heads * num_rows + row, log_sum.to(after.dtype.element_ty), head < OF_GROUP)


@triton.jit(do_not_specialize=["num_rows"])
def _own_keys_backward(
    grad_output,
    output,
    logsumexp,
    query,
    keys,
    values,
    grad_query,
    grad_keys,
    grad_values,
    num_rows,
    query_stride,
    key_stride,
    GROUPS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, channel = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_CHANNELS)
    inside = (head < OF_GROUP)[:, None] & (channel < CHANNELS)[None, :]
    heads = group * OF_GROUP + head
    place = heads[:, None] * CHANNELS + channel[None, :]
    of_row = row * GROUPS * OF_GROUP * CHANNELS + place
    of_key = row * key_stride + group * CHANNELS + channel
    of_grad = (row * GROUPS + group) * CHANNELS + channel
    q = tl.load(query + row * query_stride + place, inside, other=0).to(tl.float32)
    gradient = tl.load(grad_output + of_row, inside, other=0).to(tl.float32)
    mean = tl.sum(gradient * tl.load(output + of_row, inside, other=0).to(tl.float32), 1)
    # Heads that are padding get no weight.
    log_sum = tl.load(logsumexp + heads * num_rows + row, head < OF_GROUP, other=float("inf")).to(tl.float32)
    grad_q = tl.load(grad_query + of_row, inside, other=0).to(tl.float32)
    for step in tl.static_range(len(keys)):
        key = tl.load(keys[step] + of_key, channel < CHANNELS, other=0).to(tl.float32)
        value = tl.load(values[step] + of_key, channel < CHANNELS, other=0).to(tl.float32)
        weight = tl.exp(tl.sum(q * key[None, :], 1) * (CHANNELS**-0.5) - log_sum)
        grad_score = weight * (tl.sum(gradient * value[None, :], 1) - mean) * (CHANNELS**-0.5)
        grad_q += grad_score[:, None] * key[None, :]
        grad_key, grad_value = tl.sum(grad_score[:, None] * q, 0), tl.sum(weight[:, None] * gradient, 0)
        tl.store(grad_keys[step] + of_grad, grad_key.to(grad_keys[step].dtype.element_ty), channel < CHANNELS)
        tl.store(grad_values[step] + of_grad, grad_value.to(grad_values[step].dtype.element_ty), channel < CHANNELS)
    tl.store(grad_query + of_row, grad_q.to(grad_query.dtype.element_ty), inside)
