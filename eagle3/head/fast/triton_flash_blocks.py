"""Maps the programs of triton_flash.py to blocks of segments, and blocks to the keys that they read.

Shapes: as in triton_flash_forward.py.
"""

import triton.language as tl

from eagle3.head.fast.triton_jit import triton_jit

BOUNDS = ["query_bounds", "key_bounds"]  # begin anywhere: a kernel for each alignment would be compiled in training
LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction, exp is two


@triton_jit
def find_block(slot, bounds, segments, BLOCK: tl.constexpr):
    """Return the segment of a slot, and where in it the slot's block begins, which may be past its end.

    Segment i has the slots from bounds[i] // BLOCK + i: as many as it has blocks, or one more.
    """
    low, high = 0, segments - 1
    while low < high:
        middle = (low + high + 1) // 2
        before = tl.load(bounds + middle) // BLOCK + middle <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low, (slot - tl.load(bounds + low) // BLOCK - low) * BLOCK


@triton_jit
def load_stretch(bounds, segment):
    start = tl.load(bounds + segment)
    return start, tl.load(bounds + segment + 1) - start


@triton_jit
def load_rows(x, row, stride, heads, inside, CHANNELS: tl.constexpr):
    """Return x[row, heads], [rows times PACK, C]; zeros where `inside` is false."""
    place = row * stride + heads * CHANNELS
    return tl.load(x + place[:, None] + tl.arange(0, CHANNELS)[None, :], inside[:, None], other=0)


@triton_jit
def find_key_limits(
    row, first_row, num_keys, num_queries, rows: tl.constexpr, BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return how many keys each row reads, where keys end that all rows read (in blocks), and that some row reads."""
    if CAUSAL:
        earlier = num_keys - num_queries
        limit = tl.minimum(row + earlier + 1, num_keys)
        whole = (first_row + earlier + 1) // BLOCK_KEYS * BLOCK_KEYS
        stop = tl.minimum(first_row + rows + earlier, num_keys)
    else:
        limit = tl.zeros_like(row) + num_keys
        whole = num_keys // BLOCK_KEYS * BLOCK_KEYS
        stop = num_keys
    return limit, whole, stop
