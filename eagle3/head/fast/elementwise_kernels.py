"""elementwise.py in Triton: the same functions; every tensor is read or written once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from eagle3.head.fast.elementwise import FP8, FP8_MAX, TINY

BLOCK = 1024  # elements of a row that a program of SwiGLU takes
LARGEST, LEAST = tl.constexpr(FP8_MAX), tl.constexpr(TINY)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor, index: Tensor | None = None) -> None:
    size = x.shape[1]
    shape = (x.stride(0), out.stride(0), size, triton.next_power_of_2(size))
    _rms_norm[(len(out),)](x, index, weight, out, eps, *shape, num_warps=8)


def rms_norm_backward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    grad: Tensor,
    weight_sums: Tensor,
    index: Tensor | None = None,
    *,
    grad_x: Tensor,
    added: Tensor | None = None,
    give_output: bool = True,
) -> None:
    assert all(each is None or each.is_contiguous() for each in (grad_x, added, weight_sums))
    size = x.shape[1]
    tensors = (x, index, weight, grad, weight_sums, grad_x, added)
    shape = (len(grad), x.stride(0), grad.stride(0), size, triton.next_power_of_2(size))
    _rms_norm_backward[(len(weight_sums),)](*tensors, eps, *shape, give_output, num_warps=8)


def swiglu(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[1] // 2
    output = gate_up.new_empty(len(gate_up), size)
    _swiglu[(len(gate_up), triton.cdiv(size, BLOCK))](gate_up, output, size, BLOCK)
    return output


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> None:
    assert gate_up.is_contiguous() and grad.is_contiguous()
    size = grad.shape[1]
    _swiglu_backward[(len(grad), triton.cdiv(size, BLOCK))](gate_up, grad, size, BLOCK)
    increment_version(gate_up)  # as what is written in place by PyTorch: a second backward pass is refused, not wrong


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    _launch_rotate(heads, heads, cos, sin, direction=1)


def join_heads(
    parts: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    num_rotated: int,
    total: Tensor | None = None,
    step: int = 0,
) -> Tensor:
    numbers = [part.shape[1] for part in parts]
    joined = parts[0].new_empty(len(cos), sum(numbers), parts[0].shape[2])
    outputs = joined.split(numbers, dim=1)
    totals = [None] * len(parts) if total is None else total.view_as(joined).split(numbers, dim=1)
    for place, (part, output, of_part) in enumerate(zip(parts, outputs, totals, strict=True)):
        direction = -1 if place < num_rotated else 0
        _launch_rotate(part.contiguous(), output, cos, sin, of_part, step, direction=direction)
    return joined.flatten(1)


def _launch_rotate(
    heads: Tensor,
    output: Tensor,
    cos: Tensor,
    sin: Tensor,
    total: Tensor | None = None,
    step: int = 0,
    *,
    direction: int,
) -> None:
    """`direction`: 1 rotates, -1 rotates back, 0 copies."""
    number, half = heads.shape[1], cos.shape[1]
    assert heads.stride()[1:] == output.stride()[1:] == (2 * half, 1) and cos.stride() == sin.stride()
    assert total is None or total.stride() == output.stride()
    strides = heads.stride(0), output.stride(0), cos.stride(0)
    blocks = triton.next_power_of_2(number), triton.next_power_of_2(half)
    _rotate[(len(heads),)](heads, output, cos, sin, total, step, *strides, number, half, *blocks, direction)


def scale_rows(x: Tensor, factor: Tensor, kept: Tensor | None = None) -> None:
    assert x.is_contiguous() and (kept is None or kept.is_contiguous())
    size = x.shape[1]
    _scale_rows[(len(x),)](x, factor, kept, size, triton.next_power_of_2(size))
    increment_version(x)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    assert x.stride(1) == 1
    size = x.shape[1]
    values, scale = torch.empty_like(x, dtype=FP8), x.new_empty((len(x), 1), dtype=torch.float32)
    block = triton.next_power_of_2(size)  # the row stays in registers between its maximum and its cast
    _quantise[(len(x),)](x, values, scale, x.stride(0), size, block, num_warps=min(max(block // 1024, 4), 32))
    return values, scale


@triton.jit
def _rms_norm(x, index, weight, out, eps, x_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if index is not None:
        source = tl.load(index + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + source * x_stride + column, inside, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = value * scale
    if weight is not None:
        normed *= tl.load(weight + column, inside, other=0).to(tl.float32)
    tl.store(out + row * out_stride + column, normed.to(out.dtype.element_ty), inside)


# The number of rows differs from pack to pack: it must not make new kernels.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward(
    x,
    index,
    weight,
    grad,
    weight_sums,
    grad_x,
    added,
    eps,
    num_rows,
    x_stride,
    grad_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GIVE_OUTPUT: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weights = tl.load(weight + column, inside, other=0).to(tl.float32)
    # Each program adds its rows to its own sum, always in the same order: no atomics, the same bits in every run.
    sums = weight_sums + program * SIZE + column
    weight_sum = tl.load(sums, inside, other=0)
    row = program.to(tl.int64)
    while row < num_rows:
        source = row
        if index is not None:
            source = tl.load(index + row).to(tl.int64)
        value = tl.load(x + source * x_stride + column, inside, other=0).to(tl.float32)
        gradient = tl.load(grad + row * grad_stride + column, inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
        normed = value * scale
        weight_sum += gradient * normed
        weighted = gradient * weights
        result = scale * (weighted - normed * (tl.sum(weighted * normed, 0) / SIZE))
        if added is not None:
            result += tl.load(added + row * SIZE + column, inside, other=0).to(tl.float32)
        tl.store(grad_x + source * SIZE + column, result.to(grad_x.dtype.element_ty), inside)
        if GIVE_OUTPUT:
            tl.store(grad + row * grad_stride + column, (normed * weights).to(grad.dtype.element_ty), inside)
        row += programs
    tl.store(sums, weight_sum, inside)


@triton.jit
def _swiglu(gate_up, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_up += row * 2 * SIZE + column
    gate = tl.load(gate_up, inside).to(tl.float32)
    up = tl.load(gate_up + SIZE, inside).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(output + row * SIZE + column, result.to(output.dtype.element_ty), inside)


@triton.jit
def _swiglu_backward(gate_up, grad, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_up += row * 2 * SIZE + column
    grad += row * SIZE + column
    gate = tl.load(gate_up, inside).to(tl.float32)
    up = tl.load(gate_up + SIZE, inside).to(tl.float32)
    gradient = tl.load(grad, inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(gate_up, grad_gate.to(gate_up.dtype.element_ty), inside)
    tl.store(gate_up + SIZE, (gradient * silu).to(gate_up.dtype.element_ty), inside)
    tl.store(grad, (silu * up).to(grad.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["step"])
def _rotate(
    heads,
    output,
    cos,
    sin,
    total,
    step,
    row_stride,
    output_stride,
    angle_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    DIRECTION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    channel = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS) & (channel < HALF)
    place = head * (2 * HALF) + channel
    heads += row * row_stride + place
    first, second = tl.load(heads, inside), tl.load(heads + HALF, inside)
    if DIRECTION != 0:
        angle = row * angle_stride + channel
        cosine = tl.load(cos + angle, channel < HALF)
        sine = tl.load(sin + angle, channel < HALF) * DIRECTION
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        first = (wide_first * cosine - wide_second * sine).to(output.dtype.element_ty)
        second = (wide_second * cosine + wide_first * sine).to(output.dtype.element_ty)
    output += row * output_stride + place
    tl.store(output, first, inside)
    tl.store(output + HALF, second, inside)
    if total is not None:
        inside &= row + step < tl.num_programs(0)
        total += (row + step) * output_stride + place
        tl.store(total, tl.load(total, inside) + first.to(tl.float32), inside)
        tl.store(total + HALF, tl.load(total + HALF, inside) + second.to(tl.float32), inside)


@triton.jit
def _scale_rows(x, factor, kept, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x += row * SIZE + column
    scale = tl.load(factor).to(tl.float32)
    keep = True
    if kept is not None:
        keep = tl.load(kept + row)
    # The scale is 1 unless gradients of several packs are averaged: then nothing is read, and no kept row is written.
    if scale != 1 or not keep:
        value = tl.load(x, inside & keep, other=0).to(tl.float32) * scale
        tl.store(x, value.to(x.dtype.element_ty), inside)


@triton.jit
def _quantise(x, values, scale, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row * x_stride + column, inside, other=0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 0), LEAST)
    # Exact division, once a row: the same bits as the reference.
    result = value * tl.div_rn(LARGEST, largest)
    tl.store(values + row * SIZE + column, result.to(values.dtype.element_ty), inside)
    tl.store(scale + row, largest * (1 / LARGEST))
