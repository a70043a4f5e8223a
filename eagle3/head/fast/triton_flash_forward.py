"""FlashAttention-2's forward (arXiv:2307.08691, algorithm 1) on products that are wgmma on Hopper.

A program processes one block of one segment, and loops over the blocks of the other side: rows over keys, keys over
rows. It finds its segment itself, so the grid depends only on the sizes of the tensors. Query heads that share a
key/value head are in one block, PACK of them for each row: a turn of 32 rows still fills a block of 128.

Loops read blocks through tensor descriptors (TMA), which read past the end of a segment; such values are masked, or
never stored.

With scores s = q · k / √C of a row, its output is Σ exp(s) · v / Σ exp(s). Block by block, over the highest score h so
far: total = Σ exp(s - h) · v and weight = Σ exp(s - h), both times exp(h - h') when h grows to h'.

Shapes: fast/__init__.py; R rows that ask, I segments. A block has BLOCK_QUERIES queries, which are rows times PACK, and
BLOCK_KEYS keys.
"""

import triton.language as tl

from eagle3.head.fast.triton_flash_blocks import BOUNDS, LOG2_E, find_block, find_key_limits, load_rows, load_stretch
from eagle3.head.fast.triton_jit import triton_jit


@triton_jit(do_not_specialize=["segments", "num_rows"], do_not_specialize_on_alignment=BOUNDS)
def flash_forward(
    # Pointers, and descriptors (desc) of tensors that are read in whole blocks.
    query,  # [R, Q, C]
    key,  # desc [T, G · C] in blocks of [BLOCK_KEYS, C]
    value,  # desc, as key
    output,  # [R, Q, C]
    logsumexp,  # [Q, R]
    query_bounds,  # [I + 1], where segments begin and end in R
    key_bounds,  # [I + 1], and in T
    # Numbers.
    segments,  # I
    num_rows,  # R
    query_stride,  # between rows
    # Constants.
    HEADS: tl.constexpr,  # Q
    GROUPS: tl.constexpr,  # G
    CHANNELS: tl.constexpr,  # C
    PACK: tl.constexpr,  # heads of a row in a block
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    scale: tl.constexpr = CHANNELS**-0.5 * LOG2_E
    packs: tl.constexpr = HEADS // PACK
    rows: tl.constexpr = BLOCK_QUERIES // PACK
    # With a causal mask the last blocks read most: they start first, so that none runs alone at the end.
    slot = tl.num_programs(0) // packs - 1 - tl.program_id(0) // packs
    head = tl.program_id(0) % packs * PACK
    segment, first_row = find_block(slot, query_bounds, segments, rows)
    start, num_queries = load_stretch(query_bounds, segment)
    if first_row < num_queries:
        key_start, num_keys = load_stretch(key_bounds, segment)
        column = head // (HEADS // GROUPS) * CHANNELS
        lane = tl.arange(0, BLOCK_QUERIES)
        row = first_row + lane // PACK
        limit, whole, stop = find_key_limits(row, first_row, num_keys, num_queries, rows, BLOCK_KEYS, CAUSAL)
        inside = row < num_queries
        row = (start + row).to(tl.int64)
        heads = head + lane % PACK
        q = load_rows(query, row, query_stride, heads, inside, CHANNELS)
        total = tl.zeros([BLOCK_QUERIES, CHANNELS], tl.float32)
        highest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_QUERIES], tl.float32)
        sums, blocks = (total, weight, highest), (key, value, key_start, column)
        sums = _forward_blocks(sums, q, blocks, (0, whole), limit, scale, BLOCK_KEYS, MASKED=False)
        sums = _forward_blocks(sums, q, blocks, (whole, stop), limit, scale, BLOCK_KEYS, MASKED=True)
        total, weight, highest = sums
        tl.store(logsumexp + heads * num_rows + row, (highest + tl.log2(weight)) / LOG2_E, inside)
        place = (row * HEADS + heads)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        # A row without keys has zeros and -inf; any other's weight is at least 1, of its highest score.
        total = total / tl.maximum(weight, 1.0)[:, None]
        tl.store(output + place, total.to(output.dtype.element_ty), inside[:, None])


@triton_jit
def _forward_blocks(
    sums, q, blocks, stretch, limit, scale: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr
):
    """Loop over a range of keys.

    Every row attends to key 0, which comes first: its maximum is finite before a block that is fully masked.
    """
    total, weight, highest = sums
    key, value, key_start, column = blocks
    first, stop = stretch
    for first_key in tl.range(first, stop, BLOCK_KEYS):
        k = key.load([key_start + first_key, column])
        scores = tl.dot(q, k.T)
        if MASKED:
            read = first_key + tl.arange(0, BLOCK_KEYS)[None, :] < limit[:, None]
            scores = tl.where(read, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        kept = tl.exp2(highest - higher)
        weight = weight * kept + tl.sum(weights, 1)
        highest = higher
        v = value.load([key_start + first_key, column])
        total = tl.dot(weights.to(v.dtype), v, total * kept[:, None])
    return total, weight, highest
