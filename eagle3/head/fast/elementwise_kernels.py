"""elementwise.py in Triton: the same methods; every tensor is read or written once.

A program processes a row, or a block of one, in float32. Equations are those of `Elementwise`, shapes those of
fast/__init__.py; `index` and `added` may be None, which compiles a separate kernel.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from eagle3.head.fast.elementwise import FP8, FP8_MAX, TINY, Elementwise
from eagle3.head.fast.triton_jit import triton_jit

BLOCK = 1024  # elements of a row that a program of SwiGLU takes
LARGEST, LEAST = tl.constexpr(FP8_MAX), tl.constexpr(TINY)


class TritonElementwise(Elementwise):
    """Launches the kernels below, which do not support float64."""

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, out: Tensor, index: Tensor | None = None) -> None:
        size = x.shape[1]
        shape = (x.stride(0), out.stride(0), size, triton.next_power_of_2(size))
        _rms_norm[(len(out),)](x, index, weight, out, eps, *shape, num_warps=8)

    def rms_norm_backward(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        grad_output: Tensor,
        weight_sums: Tensor,
        index: Tensor | None = None,
        *,
        grad_x: Tensor,
        added: Tensor | None = None,
        give_output: bool = True,
    ) -> Tensor:
        assert all(each is None or each.is_contiguous() for each in (grad_x, added, weight_sums))
        size = x.shape[1]
        tensors = (x, index, weight, grad_output, weight_sums, grad_x, added)
        shape = (len(grad_output), x.stride(0), grad_output.stride(0), size, triton.next_power_of_2(size))
        _rms_norm_backward[(len(weight_sums),)](*tensors, eps, *shape, give_output, num_warps=8)
        return grad_output

    def swiglu(self, gate_up: Tensor) -> Tensor:
        size = gate_up.shape[1] // 2
        activation = gate_up.new_empty(len(gate_up), size)
        _swiglu[(len(gate_up), triton.cdiv(size, BLOCK))](gate_up, activation, size, BLOCK)
        return activation

    def swiglu_backward(self, gate_up: Tensor, grad_activation: Tensor) -> tuple[Tensor, Tensor]:
        assert gate_up.is_contiguous() and grad_activation.is_contiguous()
        rows, size = grad_activation.shape
        _swiglu_backward[(rows, triton.cdiv(size, BLOCK))](gate_up, grad_activation, size, BLOCK)
        increment_version(gate_up)  # as PyTorch does for overwritten tensors: a second backward then fails
        return gate_up, grad_activation

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        _launch_rotate(heads, heads, cos, sin, direction=1)

    def join_heads(
        self,
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

    def scale_rows(self, x: Tensor, factor: Tensor, kept: Tensor | None) -> None:
        assert x.is_contiguous() and (kept is None or kept.is_contiguous())
        size = x.shape[1]
        _scale_rows[(len(x),)](x, factor, kept, size, triton.next_power_of_2(size))
        increment_version(x)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert x.stride(1) == 1
        size = x.shape[1]
        values, scale = torch.empty_like(x, dtype=FP8), x.new_empty((len(x), 1), dtype=torch.float32)
        block = triton.next_power_of_2(size)  # the row stays in registers between its maximum and its cast
        num_warps = min(max(block // 1024, 4), 32)
        _quantise[(len(x),)](x, values, scale, x.stride(0), size, block, num_warps=num_warps)
        return values, scale


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
    """Rotate heads into `output` (direction 1), rotate them back (-1) or copy them (0)."""
    number, half = heads.shape[1], cos.shape[1]
    assert heads.stride()[1:] == output.stride()[1:] == (2 * half, 1) and cos.stride() == sin.stride()
    assert total is None or total.stride() == output.stride()
    strides = heads.stride(0), output.stride(0), cos.stride(0)
    blocks = triton.next_power_of_2(number), triton.next_power_of_2(half)
    _rotate[(len(heads),)](heads, output, cos, sin, total, step, *strides, number, half, *blocks, direction)


@triton_jit
def _rms_norm(
    # Pointers.
    x,  # [rows, H]
    index,  # [N] or None
    weight,  # [H] or None
    out,  # [N, H]
    # Numbers; strides are between rows.
    eps,
    x_stride,
    out_stride,
    # Constants.
    SIZE: tl.constexpr,  # H
    BLOCK: tl.constexpr,  # the power of two that covers it
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if index is not None:
        source = tl.load(index + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + source * x_stride + column, inside, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    output = value * scale
    if weight is not None:
        output *= tl.load(weight + column, inside, other=0).to(tl.float32)
    tl.store(out + row * out_stride + column, output.to(out.dtype.element_ty), inside)


# The number of rows differs from pack to pack and must not compile new kernels.
@triton_jit(do_not_specialize=["num_rows"])
def _rms_norm_backward(
    # Pointers.
    x,  # [rows, H]
    index,  # [N] or None
    weight,  # [H]
    grad_output,  # [N, H]
    weight_sums,  # [X, H]
    grad_x,  # [rows, H]
    added,  # [N, H] or None
    # Numbers; strides are between rows.
    eps,
    num_rows,  # N
    x_stride,
    grad_stride,
    # Constants.
    SIZE: tl.constexpr,  # H
    BLOCK: tl.constexpr,  # the power of two that covers it
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
        grad = tl.load(grad_output + row * grad_stride + column, inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
        normed = value * scale
        weight_sum += grad * normed
        grad_normed = grad * weights
        grad_value = scale * (grad_normed - normed * (tl.sum(grad_normed * normed, 0) / SIZE))
        if added is not None:
            grad_value += tl.load(added + row * SIZE + column, inside, other=0).to(tl.float32)
        tl.store(grad_x + source * SIZE + column, grad_value.to(grad_x.dtype.element_ty), inside)
        if GIVE_OUTPUT:  # over the gradient, which has been read
            output = (normed * weights).to(grad_output.dtype.element_ty)
            tl.store(grad_output + row * grad_stride + column, output, inside)
        row += programs
    tl.store(sums, weight_sum, inside)


@triton_jit
def _swiglu(
    # Pointers.
    gate_up,  # [N, 2F]
    activation,  # [N, F]
    # Constants.
    SIZE: tl.constexpr,  # F
    BLOCK: tl.constexpr,  # how much of it a program takes
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_up += row * 2 * SIZE + column
    gate = tl.load(gate_up, inside).to(tl.float32)
    up = tl.load(gate_up + SIZE, inside).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(activation + row * SIZE + column, result.to(activation.dtype.element_ty), inside)


@triton_jit
def _swiglu_backward(
    # Pointers; each tensor is read, then overwritten.
    gate_up,  # [N, 2F]: gate and up, then their gradients
    activation,  # [N, F]: the gradient of the activation, then the activation
    # Constants.
    SIZE: tl.constexpr,  # F
    BLOCK: tl.constexpr,  # how much of it a program takes
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_up += row * 2 * SIZE + column
    activation += row * SIZE + column
    gate = tl.load(gate_up, inside).to(tl.float32)
    up = tl.load(gate_up + SIZE, inside).to(tl.float32)
    grad = tl.load(activation, inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(gate_up, grad_gate.to(gate_up.dtype.element_ty), inside)
    tl.store(gate_up + SIZE, (grad * silu).to(gate_up.dtype.element_ty), inside)
    tl.store(activation, (silu * up).to(activation.dtype.element_ty), inside)


@triton_jit(do_not_specialize=["step"])
def _rotate(
    # Pointers.
    heads,  # [N, heads, C]
    output,  # the same, and may be the same memory
    cos,  # [N, E]
    sin,  # [N, E]
    total,  # as output, or None: row i of the output is added to its row i + step
    # Numbers; strides are between rows.
    step,
    row_stride,
    output_stride,
    angle_stride,
    # Constants.
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # E
    BLOCK_HEADS: tl.constexpr,  # the powers of two that cover them
    BLOCK_HALF: tl.constexpr,
    DIRECTION: tl.constexpr,  # 1 rotates, -1 rotates back, 0 copies
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


@triton_jit
def _scale_rows(
    # Pointers.
    x,  # [N, H]
    factor,  # a number
    kept,  # [N] or None
    # Constants.
    SIZE: tl.constexpr,  # H
    BLOCK: tl.constexpr,  # the power of two that covers it
):
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


@triton_jit
def _quantise(
    # Pointers.
    x,  # [N, H]
    values,  # [N, H], float8
    scale,  # [N]
    # Numbers.
    x_stride,  # between rows
    # Constants.
    SIZE: tl.constexpr,  # H
    BLOCK: tl.constexpr,  # the power of two that covers it
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row * x_stride + column, inside, other=0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 0), LEAST)
    # Exact division, once a row: the same bits as the reference.
    result = value * tl.div_rn(LARGEST, largest)
    tl.store(values + row * SIZE + column, result.to(values.dtype.element_ty), inside)
    tl.store(scale + row, largest * (1 / LARGEST))
