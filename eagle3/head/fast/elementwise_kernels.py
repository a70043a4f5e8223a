"""elementwise.py in Triton: the same functions, one kernel each; every tensor is read or written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from eagle3.head.fast.elementwise import FP8, FP8_MAX, TINY

BLOCK = 1024  # elements of a row that a program of SwiGLU takes
LARGEST, LEAST = tl.constexpr(FP8_MAX), tl.constexpr(TINY)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, index: Tensor | None = None) -> None:
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
    grad_x: Tensor | None = None,
    added: Tensor | None = None,
    *,
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


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    number, half = heads.shape[1], cos.shape[1]
    assert heads.stride()[1:] == (2 * half, 1) and cos.stride() == sin.stride()
    blocks = triton.next_power_of_2(number), triton.next_power_of_2(half)
    _rotate[(len(heads),)](heads, cos, sin, heads.stride(0), cos.stride(0), number, half, *blocks, back)


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
    normed = value * scale * tl.load(weight + column, inside, other=0).to(tl.float32)
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
        if grad_x is not None:
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


@triton.jit
def _rotate(
    heads,
    cos,
    sin,
    row_stride,
    angle_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    channel = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS) & (channel < HALF)
    angle = row * angle_stride + channel
    cosine = tl.load(cos + angle, channel < HALF)
    sine = tl.load(sin + angle, channel < HALF)
    if BACK:
        sine = -sine
    heads += row * row_stride + head * (2 * HALF) + channel
    first = tl.load(heads, inside).to(tl.float32)
    second = tl.load(heads + HALF, inside).to(tl.float32)
    tl.store(heads, (first * cosine - second * sine).to(heads.dtype.element_ty), inside)
    tl.store(heads + HALF, (second * cosine + first * sine).to(heads.dtype.element_ty), inside)


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
