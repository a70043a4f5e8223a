"""FlashAttention-2's backward (arXiv:2307.08691, algorithm 2), given the merged output and log-sum-exp.

With scores s = q · k / √C and the log-sum-exp l of a row, p = exp(s - l) are its weights, and with the gradient do of
its output o and m = do · o:

    dv = Σ p · do        ds = p · (do · v - m)        dq = Σ ds · k / √C        dk = Σ ds · q / √C

where dq sums over the keys of a row, dk and dv over the rows (and heads) of a key. Shapes and blocks: as in
triton_flash_forward.py; X padded rows, see `_sums`.
"""

import triton.language as tl

from eagle3.head.fast.triton_flash_blocks import BOUNDS, LOG2_E, find_block, find_key_limits, load_rows, load_stretch
from eagle3.head.fast.triton_jit import triton_jit


@triton_jit(do_not_specialize=["segments", "num_rows", "padded_rows"], do_not_specialize_on_alignment=BOUNDS)
def flash_prepare(
    # Pointers.
    grad_output,  # [R, Q, C]
    output,  # [R, Q, C]
    logsumexp,  # [Q, R]
    sums,  # [2, Q / PACK, X, PACK]
    query_bounds,  # [I + 1]
    # Numbers; strides are between rows.
    segments,  # I
    num_rows,  # R
    padded_rows,  # X
    grad_stride,
    output_stride,
    # Constants.
    HEADS: tl.constexpr,  # Q
    CHANNELS: tl.constexpr,  # C
    PACK: tl.constexpr,  # heads of a row in a block
    BLOCK_QUERIES: tl.constexpr,
):
    """Store the inputs of both kernels below for each row and head: l, in powers of 2, and m."""
    packs: tl.constexpr = HEADS // PACK
    slot, head = tl.program_id(0) // packs, tl.program_id(0) % packs * PACK
    segment, first_row = find_block(slot, query_bounds, segments, BLOCK_QUERIES // PACK)
    start, num_queries = load_stretch(query_bounds, segment)
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


@triton_jit(do_not_specialize=["segments", "padded_rows"], do_not_specialize_on_alignment=BOUNDS)
def flash_query_gradient(
    # Pointers, and descriptors (desc) of tensors that are read in whole blocks.
    grad_output,  # [R, Q, C]
    query,  # [R, Q, C]
    key,  # desc [T, G · C] in blocks of [BLOCK_KEYS, C]
    value,  # desc, as key
    sums,  # [2, Q / PACK, X, PACK]
    grad_query,  # [R, Q, C]
    query_bounds,  # [I + 1]
    key_bounds,  # [I + 1]
    # Numbers; strides are between rows.
    segments,  # I
    padded_rows,  # X
    grad_stride,
    query_stride,
    # Constants.
    HEADS: tl.constexpr,  # Q
    GROUPS: tl.constexpr,  # G
    CHANNELS: tl.constexpr,  # C
    PACK: tl.constexpr,  # heads of a row in a block
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    scale: tl.constexpr = CHANNELS**-0.5
    packs: tl.constexpr = HEADS // PACK
    rows: tl.constexpr = BLOCK_QUERIES // PACK
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
        gradient = load_rows(grad_output, row, grad_stride, heads, inside, CHANNELS)
        place = _sums(head, start, segment, padded_rows, PACK) + first_row * PACK + lane
        log_sum = tl.load(sums + place)
        mean = tl.load(sums + HEADS * padded_rows + place)
        total = tl.zeros([BLOCK_QUERIES, CHANNELS], tl.float32)
        of_rows, blocks = (q, gradient, log_sum, mean), (key, value, key_start, column)
        total = _query_gradient_blocks(total, of_rows, blocks, (0, whole), limit, scale, BLOCK_KEYS, MASKED=False)
        total = _query_gradient_blocks(total, of_rows, blocks, (whole, stop), limit, scale, BLOCK_KEYS, MASKED=True)
        place = (row * HEADS + heads)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        tl.store(grad_query + place, (total * scale).to(grad_query.dtype.element_ty), inside[:, None])


@triton_jit
def _query_gradient_blocks(
    total, of_rows, blocks, stretch, limit, scale: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr
):
    q, gradient, log_sum, mean = of_rows
    key, value, key_start, column = blocks
    first, stop = stretch
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


@triton_jit(do_not_specialize=["segments", "padded_rows"], do_not_specialize_on_alignment=BOUNDS)
def flash_key_value_gradient(
    # Pointers, and descriptors (desc) of tensors that are read in whole blocks.
    grad_output,  # desc [R, Q, C] in blocks of [BLOCK_QUERIES / PACK, PACK, C]
    query,  # desc, as grad_output
    key,  # desc [T, G · C] in blocks of [BLOCK_KEYS, C]
    value,  # desc, as key
    sums,  # desc [2 · Q · X] in blocks of [BLOCK_QUERIES]
    grad_key,  # [T, G, C]
    grad_value,  # [T, G, C]
    query_bounds,  # [I + 1]
    key_bounds,  # [I + 1]
    # Numbers.
    segments,  # I
    padded_rows,  # X
    # Constants.
    HEADS: tl.constexpr,  # Q
    GROUPS: tl.constexpr,  # G
    CHANNELS: tl.constexpr,  # C
    PACK: tl.constexpr,  # heads of a row in a block
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Sum the gradients of key and value over all heads of the group, in one order: the same bits in every run."""
    scale: tl.constexpr = CHANNELS**-0.5
    of_group: tl.constexpr = HEADS // GROUPS
    rows: tl.constexpr = BLOCK_QUERIES // PACK
    slot, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS  # causally the first keys are read most
    segment, first_key = find_block(slot, key_bounds, segments, BLOCK_KEYS)
    key_start, num_keys = load_stretch(key_bounds, segment)
    if first_key < num_keys:
        start, num_queries = load_stretch(query_bounds, segment)
        k = key.load([key_start + first_key, group * CHANNELS])
        v = value.load([key_start + first_key, group * CHANNELS])
        first_reader, readers = _find_readers(first_key, num_keys, num_queries, rows, BLOCK_KEYS, CAUSAL)
        total_k = tl.zeros([BLOCK_KEYS, CHANNELS], tl.float32)
        total_v = tl.zeros([BLOCK_KEYS, CHANNELS], tl.float32)
        totals, kv, tensors = (total_k, total_v), (k, v), (query, grad_output, sums)
        for head in tl.range(group * of_group, (group + 1) * of_group, PACK):
            stretch = (start, num_queries, head, _sums(head, start, segment, padded_rows, PACK), padded_rows)
            totals = _key_value_gradient_blocks(
                totals, kv, tensors, stretch, readers, first_reader, scale, HEADS, PACK, BLOCK_QUERIES, MASKED=True
            )
            totals = _key_value_gradient_blocks(
                totals, kv, tensors, stretch, readers, first_reader, scale, HEADS, PACK, BLOCK_QUERIES, MASKED=False
            )
        total_k, total_v = totals
        # Loaded again: keeping them over the loops would take registers that these need.
        segment, first_key = find_block(slot, key_bounds, segments, BLOCK_KEYS)
        key_start, num_keys = load_stretch(key_bounds, segment)
        keys = first_key + tl.arange(0, BLOCK_KEYS)
        inside = (keys < num_keys)[:, None]
        place = (key_start + keys).to(tl.int64) * GROUPS + group
        place = place[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        tl.store(grad_key + place, (total_k * scale).to(grad_key.dtype.element_ty), inside)
        tl.store(grad_value + place, total_v.to(grad_value.dtype.element_ty), inside)


@triton_jit
def _find_readers(first_key, num_keys, num_queries, rows: tl.constexpr, BLOCK_KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the first row that reads each key of a block; and of rows, in blocks: the first that reads some key, from
    where on all read every key, and the end of whole blocks. The last block of a segment may end past it.
    """
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
    return first_reader, (first, whole, stop)


@triton_jit
def _key_value_gradient_blocks(
    totals,
    kv,
    tensors,
    stretch,
    readers,
    first_reader,
    scale: tl.constexpr,
    HEADS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Loop over rows: those that attend to every key without a mask, or the others with one."""
    total_k, total_v = totals
    k, v = kv
    query, grad_output, sums = tensors
    start, num_queries, head, first_sum, padded_rows = stretch
    first, whole, stop = readers
    rows: tl.constexpr = BLOCK_QUERIES // PACK
    channels: tl.constexpr = k.shape[1]
    lane = tl.arange(0, BLOCK_QUERIES)
    begin, end = whole, stop
    if MASKED:  # those before `whole`, then the one after `stop`
        begin, end = first, whole + tl.where(stop < num_queries, rows, 0)
    for first_row in tl.range(begin, end, rows):
        if MASKED:
            first_row = tl.where(first_row < whole, first_row, stop)
        q = query.load([start + first_row, head, 0]).reshape(BLOCK_QUERIES, channels)
        gradient = grad_output.load([start + first_row, head, 0]).reshape(BLOCK_QUERIES, channels)
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
    return total_k, total_v


@triton_jit
def _sums(head, start, segment, padded_rows, PACK: tl.constexpr):
    """Return where the sums of a segment begin: at a multiple of 16 bytes, as descriptors require."""
    return (head // PACK * padded_rows + (start // 4 + segment) * 4) * PACK
