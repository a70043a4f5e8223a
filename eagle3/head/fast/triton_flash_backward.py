"""FlashAttention-2's backward (arXiv:2307.08691, algorithm 2), given the merged output and log-sum-exp.

Shapes and blocks: as in triton_flash_forward.py.
"""

import triton
import triton.language as tl

from eagle3.head.fast.triton_flash_blocks import BOUNDS, LOG2_E, block_of, load_rows, reach_of, stretch_of


@triton.jit(do_not_specialize=["segments", "num_rows", "padded_rows"], do_not_specialize_on_alignment=BOUNDS)
def flash_prepare(
    grad_output,
    output,
    logsumexp,
    sums,
    query_bounds,
    segments,
    num_rows,
    padded_rows,
    grad_stride,
    output_stride,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
):
    """sums [2, Q / PACK, padded rows, PACK]: log2-sum-exp2 of scaled scores; the mean gradient of a row's weights."""
    packs: tl.constexpr = HEADS // PACK
    slot, head = tl.program_id(0) // packs, tl.program_id(0) % packs * PACK
    segment, first_row = block_of(slot, query_bounds, segments, BLOCK_QUERIES // PACK)
    start, num_queries = stretch_of(query_bounds, segment)
    if first_row < num_queries:
        lane = tl.arange(0, BLOCK_QUERIES)
        row = first_row + lane // PACK
        inside = row < num_queries
        row, heads = (start + row).to(tl.int64), head + lane % PACK
        gradient = load_rows(grad_output, row, grad_stride, heads, inside, CHANNELS).to(tl.float32)
        result = load_rows(output, row, output_stride, heads, inside, CHANNELS).to(tl.float32)
        log_sum = tl.load(logsumexp + heads * num_rows + row, inside, other=0).to(tl.float32)
        place = _sums(head, start, segment, padded_rows, PACK) + first_row * PACK + lane
        tl.store(sums + place, log_sum * LOG2_E, inside)
        tl.store(sums + HEADS * padded_rows + place, tl.sum(gradient * result, 1), inside)


@triton.jit(do_not_specialize=["segments", "padded_rows"], do_not_specialize_on_alignment=BOUNDS)
def flash_query_gradient(
    grad_output,
    query,
    key,  # descriptor of [T, G C], blocks of [K, C]
    value,
    sums,
    grad_query,
    query_bounds,
    key_bounds,
    segments,
    padded_rows,
    grad_stride,
    query_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    scale: tl.constexpr = CHANNELS**-0.5
    packs: tl.constexpr = HEADS // PACK
    rows: tl.constexpr = BLOCK_QUERIES // PACK
    slot = tl.num_programs(0) // packs - 1 - tl.program_id(0) // packs
    head = tl.program_id(0) % packs * PACK
    segment, first_row = block_of(slot, query_bounds, segments, rows)
    start, num_queries = stretch_of(query_bounds, segment)
    if first_row < num_queries:
        key_start, num_keys = stretch_of(key_bounds, segment)
        column = head // (HEADS // GROUPS) * CHANNELS
        lane = tl.arange(0, BLOCK_QUERIES)
        row = first_row + lane // PACK
        limit, whole, stop = reach_of(row, first_row, num_keys, num_queries, rows, BLOCK_KEYS, CAUSAL)
        inside = row < num_queries
        row = (start + row).to(tl.int64)
        heads = head + lane % PACK
        q = load_rows(query, row, query_stride, heads, inside, CHANNELS)
        gradient = load_rows(grad_output, row, grad_stride, heads, inside, CHANNELS)
        place = _sums(head, start, segment, padded_rows, PACK) + first_row * PACK + lane
        log_sum = tl.load(sums + place)
        mean = tl.load(sums + HEADS * padded_rows + place)
        total = tl.zeros([BLOCK_QUERIES, CHANNELS], tl.float32)
        total = _query_gradient_blocks(
            q, gradient, key, value, log_sum, mean, key_start, column, 0, whole, limit, total, scale, BLOCK_KEYS, False
        )
        total = _query_gradient_blocks(
            q, gradient, key, value, log_sum, mean, key_start, column, whole, stop, limit, total, scale, BLOCK_KEYS,
            True,
        )  # fmt: skip
        place = (row * HEADS + heads)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        tl.store(grad_query + place, (total * scale).to(grad_query.dtype.element_ty), inside[:, None])


@triton.jit
def _query_gradient_blocks(
    q,
    gradient,
    key,
    value,
    log_sum,
    mean,
    key_start,
    column,
    first,
    stop,
    limit,
    total,
    scale: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    for first_key in tl.range(first, stop, BLOCK_KEYS):
        k = key.load([key_start + first_key, column])
        v = value.load([key_start + first_key, column])
        weights = tl.exp2(tl.dot(q, k.T) * (scale * LOG2_E) - log_sum[:, None])
        if MASKED:
            read = first_key + tl.arange(0, BLOCK_KEYS)[None, :] < limit[:, None]
            weights = tl.where(read, weights, 0)
        grad_scores = weights * (tl.dot(gradient, v.T) - mean[:, None])
        total = tl.dot(grad_scores.to(k.dtype), k, total)
    return total


@triton.jit(do_not_specialize=["segments", "padded_rows"], do_not_specialize_on_alignment=BOUNDS)
def flash_key_value_gradient(
    grad_output,  # descriptor of [R, Q, C], blocks of [M / PACK, PACK, C]
    query,
    key,  # descriptor of [T, G C], blocks of [K, C]
    value,
    sums,  # descriptor of blocks of M
    grad_query,  # descriptor, as query; added to if it is not None
    grad_key,
    grad_value,
    query_bounds,
    key_bounds,
    segments,
    padded_rows,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Of key and value over all heads of the group, in one order: the same bits in every run.

    That of the query, if asked for, is added up in memory in any order: two products less, other last bits in each run.
    """
    scale: tl.constexpr = CHANNELS**-0.5
    of_group: tl.constexpr = HEADS // GROUPS
    rows: tl.constexpr = BLOCK_QUERIES // PACK
    slot, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS  # causally the first keys are read most
    segment, first_key = block_of(slot, key_bounds, segments, BLOCK_KEYS)
    key_start, num_keys = stretch_of(key_bounds, segment)
    if first_key < num_keys:
        start, num_queries = stretch_of(query_bounds, segment)
        k = key.load([key_start + first_key, group * CHANNELS])
        v = value.load([key_start + first_key, group * CHANNELS])
        # Blocks of rows that read all of these keys need no mask, unless the last one ends behind the segment.
        keys = first_key + tl.arange(0, BLOCK_KEYS)
        stop = num_queries // rows * rows
        if CAUSAL:
            earlier = num_keys - num_queries  # keys that every row reads
            first = tl.maximum(first_key - earlier, 0) // rows * rows
            whole = tl.cdiv(tl.maximum(first_key + BLOCK_KEYS - 1 - earlier, 0), rows) * rows
            whole = tl.maximum(tl.minimum(whole, stop), first)
            first_reader = keys - earlier
        else:
            first = 0
            whole = tl.where(first_key + BLOCK_KEYS <= num_keys, 0, stop)
            first_reader = tl.where(keys < num_keys, 0, num_queries)
        total_k = tl.zeros([BLOCK_KEYS, CHANNELS], tl.float32)
        total_v = tl.zeros([BLOCK_KEYS, CHANNELS], tl.float32)
        for head in tl.range(group * of_group, (group + 1) * of_group, PACK):
            first_sum = _sums(head, start, segment, padded_rows, PACK)
            total_k, total_v = _key_value_gradient_blocks(
                k, v, query, grad_output, sums, grad_query, padded_rows, first_sum, start, num_queries, head, first,
                whole, stop, first_reader, total_k, total_v, scale, HEADS, CHANNELS, PACK, BLOCK_QUERIES, True,
            )  # fmt: skip
            total_k, total_v = _key_value_gradient_blocks(
                k, v, query, grad_output, sums, grad_query, padded_rows, first_sum, start, num_queries, head, first,
                whole, stop, first_reader, total_k, total_v, scale, HEADS, CHANNELS, PACK, BLOCK_QUERIES, False,
            )  # fmt: skip
        # Looked up again: to keep them over the loops would take registers that these lack.
        segment, first_key = block_of(slot, key_bounds, segments, BLOCK_KEYS)
        key_start, num_keys = stretch_of(key_bounds, segment)
        keys = first_key + tl.arange(0, BLOCK_KEYS)
        inside = (keys < num_keys)[:, None]
        place = (key_start + keys).to(tl.int64) * GROUPS + group
        place = place[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        tl.store(grad_key + place, (total_k * scale).to(grad_key.dtype.element_ty), inside)
        tl.store(grad_value + place, total_v.to(grad_value.dtype.element_ty), inside)


@triton.jit
def _key_value_gradient_blocks(
    k,
    v,
    query,
    grad_output,
    sums,
    grad_query,
    padded_rows,
    first_sum,
    start,
    num_queries,
    head,
    first,
    whole,
    stop,
    first_reader,
    total_k,
    total_v,
    scale: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    MASKED: tl.constexpr,
):
    rows: tl.constexpr = BLOCK_QUERIES // PACK
    lane = tl.arange(0, BLOCK_QUERIES)
    begin, end = whole, stop
    if MASKED:  # those before `whole`, then the one behind `stop`
        begin, end = first, whole + tl.where(stop < num_queries, rows, 0)
    for first_row in tl.range(begin, end, rows):
        if MASKED:
            first_row = tl.where(first_row < whole, first_row, stop)
        q = query.load([start + first_row, head, 0]).reshape(BLOCK_QUERIES, CHANNELS)
        gradient = grad_output.load([start + first_row, head, 0]).reshape(BLOCK_QUERIES, CHANNELS)
        log_sum = sums.load([first_sum + first_row * PACK])
        mean = sums.load([first_sum + HEADS * padded_rows + first_row * PACK])
        weights = tl.exp2(tl.dot(k, q.T) * (scale * LOG2_E) - log_sum[None, :])
        if MASKED:
            row = (first_row + lane // PACK)[None, :]
            weights = tl.where((first_reader[:, None] <= row) & (row < num_queries), weights, 0)
        total_v = tl.dot(weights.to(gradient.dtype), gradient, total_v)
        grad_scores = weights * (tl.dot(v, gradient.T) - mean[None, :])
        grad_scores = grad_scores.to(q.dtype)
        total_k = tl.dot(grad_scores, q, total_k)
        if grad_query is not None:
            part = tl.dot(grad_scores.T, k) * scale
            grad_query.atomic_add([start + first_row, head, 0], part.reshape(rows, PACK, CHANNELS))
    return total_k, total_v


@triton.jit
def _sums(head, start, segment, padded_rows, PACK: tl.constexpr):
    """Where the sums of a segment begin: at a multiple of 16 bytes, as blocks of a descriptor should."""
    return (head // PACK * padded_rows + (start // 4 + segment) * 4) * PACK
