"""The kernels of triton_flash.py: FlashAttention-2 (arXiv:2307.08691) on products that are wgmma on Hopper.

A program takes a block of one segment, and goes through the blocks on the other side: rows with keys, keys with rows.
It finds its segment itself, so that the grid needs no more than the sizes of the tensors. Query heads that share a
key/value head lie in one block, PACK of them for each row: a turn of 32 rows still fills a block of 128.

Inputs come through tensor descriptors (TMA), which read past the end of a segment: what they read there is masked, or
never stored.

Shapes: T tokens of the pack, R rows that ask, N segments, Q query heads, G key/value heads, C channels; inside a
program M rows times PACK heads, K keys.
"""

import triton
import triton.language as tl

BOUNDS = ["query_bounds", "key_bounds"]  # begin anywhere: a kernel for each alignment would be compiled in training
LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction, exp is two


@triton.jit(do_not_specialize=["segments", "num_rows"], do_not_specialize_on_alignment=BOUNDS)
def flash_forward(
    query,
    key,  # descriptor of [T, G C], blocks of [K, C]
    value,
    output,
    logsumexp,
    query_bounds,
    key_bounds,
    segments,
    num_rows,
    query_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    scale: tl.constexpr = CHANNELS**-0.5 * LOG2_E
    packs: tl.constexpr = HEADS // PACK
    rows: tl.constexpr = BLOCK_QUERIES // PACK
    # Causally the last blocks read most: they start first, so that none of them is left alone at the end.
    slot = tl.num_programs(0) // packs - 1 - tl.program_id(0) // packs
    head = tl.program_id(0) % packs * PACK
    segment, first_row = _place(slot, query_bounds, segments, rows)
    start, num_queries = _stretch(query_bounds, segment)
    if first_row < num_queries:
        key_start, num_keys = _stretch(key_bounds, segment)
        column = head // (HEADS // GROUPS) * CHANNELS
        lane = tl.arange(0, BLOCK_QUERIES)
        row = first_row + lane // PACK
        limit, whole, stop = _reach(row, first_row, num_keys, num_queries, rows, BLOCK_KEYS, CAUSAL)
        inside = row < num_queries
        row = (start + row).to(tl.int64)
        heads = head + lane % PACK
        q = _rows(query, row, query_stride, heads, inside, CHANNELS)
        total = tl.zeros([BLOCK_QUERIES, CHANNELS], tl.float32)
        highest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_QUERIES], tl.float32)
        total, weight, highest = _forward_blocks(
            q, key, value, key_start, column, 0, whole, limit, total, weight, highest, scale, BLOCK_KEYS, False
        )
        total, weight, highest = _forward_blocks(
            q, key, value, key_start, column, whole, stop, limit, total, weight, highest, scale, BLOCK_KEYS, True
        )
        tl.store(logsumexp + heads * num_rows + row, (highest + tl.log2(weight)) / LOG2_E, inside)
        place = (row * HEADS + heads)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        tl.store(output + place, (total / weight[:, None]).to(output.dtype.element_ty), inside[:, None])


@triton.jit
def _forward_blocks(
    q,
    key,
    value,
    key_start,
    column,
    first,
    stop,
    limit,
    total,
    weight,
    highest,
    scale: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Every row reads key 0, which comes first: its highest score is finite before a block that it reads nothing of."""
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
    segment, first_row = _place(slot, query_bounds, segments, BLOCK_QUERIES // PACK)
    start, num_queries = _stretch(query_bounds, segment)
    if first_row < num_queries:
        lane = tl.arange(0, BLOCK_QUERIES)
        row = first_row + lane // PACK
        inside = row < num_queries
        row, heads = (start + row).to(tl.int64), head + lane % PACK
        gradient = _rows(grad_output, row, grad_stride, heads, inside, CHANNELS).to(tl.float32)
        result = _rows(output, row, output_stride, heads, inside, CHANNELS).to(tl.float32)
        log_sum = tl.load(logsumexp + heads * num_rows + row, inside, other=0).to(tl.float32)
        sums += _sums(head, start, segment, padded_rows, PACK) + first_row * PACK + lane
        tl.store(sums, log_sum * LOG2_E, inside)
        tl.store(sums + HEADS * padded_rows, tl.sum(gradient * result, 1), inside)


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
    segment, first_row = _place(slot, query_bounds, segments, rows)
    start, num_queries = _stretch(query_bounds, segment)
    if first_row < num_queries:
        key_start, num_keys = _stretch(key_bounds, segment)
        column = head // (HEADS // GROUPS) * CHANNELS
        lane = tl.arange(0, BLOCK_QUERIES)
        row = first_row + lane // PACK
        limit, whole, stop = _reach(row, first_row, num_keys, num_queries, rows, BLOCK_KEYS, CAUSAL)
        inside = row < num_queries
        row = (start + row).to(tl.int64)
        heads = head + lane % PACK
        q = _rows(query, row, query_stride, heads, inside, CHANNELS)
        gradient = _rows(grad_output, row, grad_stride, heads, inside, CHANNELS)
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
    """Over all heads of the group, in one order: no atomics, the same bits in every run."""
    scale: tl.constexpr = CHANNELS**-0.5
    of_group: tl.constexpr = HEADS // GROUPS
    rows: tl.constexpr = BLOCK_QUERIES // PACK
    slot, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS  # causally the first keys are read most
    segment, first_key = _place(slot, key_bounds, segments, BLOCK_KEYS)
    key_start, num_keys = _stretch(key_bounds, segment)
    if first_key < num_keys:
        start, num_queries = _stretch(query_bounds, segment)
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
        segment, first_key = _place(slot, key_bounds, segments, BLOCK_KEYS)
        key_start, num_keys = _stretch(key_bounds, segment)
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
def _place(slot, bounds, segments, BLOCK: tl.constexpr):
    """The segment of a slot, and where in it the slot's block begins, which may be behind its end.

    Segment i has the slots from bounds[i] // BLOCK + i: as many as it has blocks, or one more.
    """
    low, high = 0, segments - 1
    while low < high:
        middle = (low + high + 1) // 2
        before = tl.load(bounds + middle) // BLOCK + middle <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low, (slot - tl.load(bounds + low) // BLOCK - low) * BLOCK


@triton.jit
def _rows(x, row, stride, heads, inside, CHANNELS: tl.constexpr):
    place = row * stride + heads * CHANNELS
    return tl.load(x + place[:, None] + tl.arange(0, CHANNELS)[None, :], inside[:, None], other=0)


@triton.jit
def _sums(head, start, segment, padded_rows, PACK: tl.constexpr):
    """Where the sums of a segment begin: at a multiple of 16 bytes, as blocks of a descriptor should."""
    return (head // PACK * padded_rows + (start // 4 + segment) * 4) * PACK


@triton.jit
def _stretch(bounds, segment):
    start = tl.load(bounds + segment)
    return start, tl.load(bounds + segment + 1) - start


@triton.jit
def _reach(row, first_row, num_keys, num_queries, rows: tl.constexpr, BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """How many keys each row reads; where the blocks that all rows read whole end; and those that some row reads."""
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
