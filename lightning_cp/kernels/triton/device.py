"""Device code of FlashAttention-2 over the tiles of a block; imported only if Triton is installed.

Scores are in units of log2, for ``exp2``. With ``inner`` and ``outer`` from the host:
``s = (q.k) * inner``, or with a cap ``s = outer * tanh((q.k) * inner)``; then with slopes
``s -= slope * |i - j + shift|``. Forward is Dao 2023, arXiv 2307.08691, algorithm 1. Plain scores are masked
and compared as ``q.k``: the only product with ``inner``, which is above 0, is a part of ``exp2``'s argument.

Backward recomputes weights from the merged log-sum-exp. With ``delta = rowsum(dout * out)``:
``dv = p' dout``, ``ds = p (dout v' - delta)``, ``dq = ds k``, ``dk = ds' q`` (algorithm 2). dq and delta come
from programs that own queries, then dk and dv from programs that own keys: no two add to the same place, so
that the sums have a fixed order. Programs of keys have all query heads of their K/V head, or one, whose sums
the host adds up.

Annotations of device code are read by Triton, so no ``from __future__ import annotations`` here.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
import triton
import triton.language as tl


@triton.jit
def tokens(x, row, head, first, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers [BLOCK, BLOCK_D] to one head of the tokens ``first ..``.

    The first one is computed in 64 bits: a tensor may have more than 2^31 entries.
    """
    start = x.at + tl.cast(row, tl.int64) * x.batch + tl.cast(head, tl.int64) * x.head
    start += tl.cast(first, tl.int64) * x.token
    return start + tl.arange(0, BLOCK)[:, None] * x.token + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def numbers(x, row, head, first, BLOCK: tl.constexpr):
    """Return pointers [BLOCK] to one number per token."""
    start = x.at + tl.cast(row, tl.int64) * x.batch + tl.cast(head, tl.int64) * x.head
    return start + tl.cast(first, tl.int64) * x.token + tl.arange(0, BLOCK) * x.token


@triton.jit
def load_block(pointers, count, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load [BLOCK, BLOCK_D], 0 beyond the first ``count`` tokens and beyond D."""
    inside = tl.arange(0, BLOCK)[:, None] < count
    if BLOCK_D != D:
        inside = inside & (tl.arange(0, BLOCK_D)[None, :] < D)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def load_whole_block(pointers, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load [BLOCK, BLOCK_D] of a complete block of tokens, 0 beyond D."""
    if BLOCK_D != D:
        return tl.load(pointers, mask=tl.arange(0, BLOCK_D)[None, :] < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_block(pointers, x, count, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the first ``count`` tokens."""
    inside = tl.arange(0, BLOCK)[:, None] < count
    if BLOCK_D != D:
        inside = inside & (tl.arange(0, BLOCK_D)[None, :] < D)
    tl.store(pointers, x, mask=inside)


@triton.jit
def give_block(
    pointers, x, count, ADDS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Write the first ``count`` tokens, or add to them; no other program touches them."""
    if ADDS:
        x += load_block(pointers, count, BLOCK, D, BLOCK_D)
    store_block(pointers, x, count, BLOCK, D, BLOCK_D)


@triton.jit
def seen_range(begin, end, first, last, near, far, BLOCK: tl.constexpr):
    """Return the part of the tokens ``begin .. end`` that the block ``first .. last`` sees, in three parts.

    Token i of the block sees ``i + near .. i + far``. The middle part has whole blocks that every token
    of the block sees: no mask is needed there.
    """
    start = tl.maximum(begin, first + near)
    stop = tl.minimum(end, last + far)
    whole = start + tl.cdiv(tl.maximum(last - 1 + near - start, 0), BLOCK) * BLOCK
    whole = tl.minimum(whole, stop)
    cut = whole + tl.maximum(tl.minimum(stop, first + far + 1) - whole, 0) // BLOCK * BLOCK
    return start, whole, cut, stop


@triton.jit
def tanh(x):
    """Compute tanh to a few units in the last place, for small x too, by Eigen's float32 approximation.

    Odd over even polynomial on +-7.9, beyond which tanh is 1 in float32. ``1 - 2 / (exp(2 x) + 1)`` loses
    precision for small x, and Triton's own tanh is missing in its interpreter.
    """
    x = tl.minimum(tl.maximum(x, -7.90531110763549805), 7.90531110763549805)
    y = x * x
    odd = -2.76076847742355e-16 * y + 2.00018790482477e-13
    odd = odd * y - 8.60467152213735e-11
    odd = odd * y + 5.12229709037114e-08
    odd = odd * y + 1.48572235717979e-05
    odd = odd * y + 6.37261928875436e-04
    odd = odd * y + 4.89352455891786e-03
    even = 1.19825839466702e-06 * y + 1.18534705686654e-04
    even = even * y + 2.26843463243900e-03
    even = even * y + 4.89352518554385e-03
    return x * odd / even


@triton.jit
def attend(
    weighted, total, peak, q, k, v, row, kv_head,
    first_query, edges, low, high, shift, slope, inner, outer,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Pass over the visible keys of a tile for a block of queries (``seen_range``)."""
    queries = first_query + tl.arange(0, BLOCK_Q)
    for part in tl.static_range(3):
        for at in range(edges[part], edges[part + 1], BLOCK_K):
            k_at = tokens(k, row, kv_head, at, BLOCK_K, BLOCK_D)
            v_at = tokens(v, row, kv_head, at, BLOCK_K, BLOCK_DV)
            if part == 1:
                keys = load_whole_block(k_at, D, BLOCK_D)
                values = load_whole_block(v_at, DV, BLOCK_DV)
            else:
                count = edges[part + 1] - at
                keys = load_block(k_at, count, BLOCK_K, D, BLOCK_D)
                values = load_block(v_at, count, BLOCK_K, DV, BLOCK_DV)
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
            index = at + tl.arange(0, BLOCK_K)
            ahead = index[None, :] - queries[:, None]
            if HAS_CAP:
                scores = tanh(scores * inner) * outer
            elif HAS_SLOPES:
                scores *= inner
            if HAS_SLOPES:
                scores -= slope * tl.abs(ahead - shift).to(tl.float32)
            if part != 1:
                seen = (ahead >= low) & (ahead <= high) & (index < edges[part + 1])[None, :]
                scores = tl.where(seen, scores, float("-inf"))
            unit = 1.0 if HAS_CAP or HAS_SLOPES else inner
            higher = tl.maximum(peak, tl.max(scores, 1) * unit)
            # A query without keys so far has peak -inf, and -inf - -inf would be NaN.
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores * unit - finite[:, None])
            decay = tl.exp2(peak - finite)
            total = total * decay + tl.sum(weights, 1)
            weighted = weighted * decay[:, None]
            weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
            peak = higher
    return weighted, total, peak


@triton.jit(do_not_specialize=["span_start"])
def forward(
    q, k, v, out, lse, top, slopes, tiles, blocks, refs, span_start, inner, outer,
    GROUP: tl.constexpr, IS_PER_ROW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_TOP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of one head over all its tiles: out, log-sum-exp and row maximum.

    Grid: (blocks of queries, query heads, batch rows or 1). Results start at ``span_start``.
    """
    # In reverse: under a causal mask the last queries have the most keys, and should start first.
    block = blocks + (tl.num_programs(0) - 1 - tl.program_id(0)) * 5
    row = tl.load(block) if IS_PER_ROW else tl.program_id(2)
    head = tl.program_id(1)
    first, end = tl.load(block + 1), tl.load(block + 2)
    q_at = tokens(q, row, head, first, BLOCK_Q, BLOCK_D)
    queries = load_block(q_at, end - first, BLOCK_Q, D, BLOCK_D)
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes.at + row * slopes.batch + head * slopes.head) * 1.4426950408889634
    weighted = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    for ref in range(tl.load(block + 3), tl.load(block + 4)):
        tile = tiles + tl.load(refs + ref) * 7
        low, high, shift = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
        edges = seen_range(tl.load(tile + 2), tl.load(tile + 3), first, end, low, high, BLOCK_K)
        weighted, total, peak = attend(
            weighted, total, peak, queries, k, v, row, head // GROUP,
            first, edges, low, high, shift, slope, inner, outer,
            HAS_CAP, HAS_SLOPES, D, BLOCK_D, DV, BLOCK_DV, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
    here = tl.arange(0, BLOCK_Q) < end - first
    divisor = tl.where(total == 0.0, 1.0, total)
    out_at = tokens(out, row, head, first - span_start, BLOCK_Q, BLOCK_DV)
    store_block(out_at, weighted / divisor[:, None], end - first, BLOCK_Q, DV, BLOCK_DV)
    lse_at = numbers(lse, row, head, first - span_start, BLOCK_Q)
    tl.store(lse_at, (peak + tl.log2(divisor)) * 0.6931471805599453, mask=here)
    if HAS_TOP:
        # A maximum passes over NaN, a sum does not.
        largest = tl.where(total == total, peak, total) * 0.6931471805599453
        tl.store(numbers(top, row, head, first - span_start, BLOCK_Q), largest, mask=here)


@triton.jit
def weigh(
    products, ahead, seen, lse, slope, shift, inner, outer,
    IS_CUT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Return the weights of the scores, and the derivative of the cap."""
    scores = products * inner
    bend = 1.0
    if HAS_CAP:
        capped = tanh(scores)
        bend = 1.0 - capped * capped
        scores = capped * outer
    if HAS_SLOPES:
        scores -= slope * tl.abs(ahead - shift).to(tl.float32)
    if IS_CUT:
        scores = tl.where(seen, scores, float("-inf"))
    return tl.exp2(scores - lse), bend


@triton.jit
def load_numbers(x, row, head, first, count, other, IS_CUT: tl.constexpr, BLOCK: tl.constexpr):
    """Load one number per token of a block; ``other`` beyond the first ``count`` tokens if it is cut."""
    if IS_CUT:
        mask = tl.arange(0, BLOCK) < count
        return tl.load(numbers(x, row, head, first, BLOCK), mask=mask, other=other)
    else:
        return tl.load(numbers(x, row, head, first, BLOCK))


@triton.jit
def to_log2(lse):
    """Return lse in units of log2; +inf for a query without keys, which gives weights exp(s - inf) = 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse) * 1.4426950408889634


@triton.jit
def differentiate_queries(
    dq, q, dout, lse, delta, k, v, row, kv_head,
    first_query, edges, low, high, shift, slope, inner, outer,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add to dq of a block of queries from the visible keys of a tile (``seen_range``)."""
    queries = first_query + tl.arange(0, BLOCK_Q)
    for part in tl.static_range(3):
        for at in range(edges[part], edges[part + 1], BLOCK_K):
            k_at = tokens(k, row, kv_head, at, BLOCK_K, BLOCK_D)
            v_at = tokens(v, row, kv_head, at, BLOCK_K, BLOCK_DV)
            if part == 1:
                keys = load_whole_block(k_at, D, BLOCK_D)
                values = load_whole_block(v_at, DV, BLOCK_DV)
            else:
                count = edges[part + 1] - at
                keys = load_block(k_at, count, BLOCK_K, D, BLOCK_D)
                values = load_block(v_at, count, BLOCK_K, DV, BLOCK_DV)
            products = tl.dot(q, tl.trans(keys), input_precision="ieee")
            index = at + tl.arange(0, BLOCK_K)
            ahead = index[None, :] - queries[:, None]
            seen = (ahead >= low) & (ahead <= high) & (index < edges[part + 1])[None, :]
            weights, bend = weigh(
                products, ahead, seen, lse[:, None], slope, shift, inner, outer,
                part != 1, HAS_CAP, HAS_SLOPES,
            )  # fmt: skip
            dweights = tl.dot(dout, tl.trans(values), input_precision="ieee")
            dscores = weights * (dweights - delta[:, None]) * bend
            dq = tl.dot(dscores.to(keys.dtype), keys, dq, input_precision="ieee")
    return dq


@triton.jit
def backward_queries(
    dout, q, k, v, out, lse, delta, dq, slopes, tiles, blocks, refs, scale, inner, outer,
    GROUP: tl.constexpr, IS_PER_ROW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, ADDS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dq of one block of queries of one head, over all its tiles, and its delta.

    Grid: (blocks of queries, query heads, batch rows or 1).
    """
    block = blocks + (tl.num_programs(0) - 1 - tl.program_id(0)) * 5
    row = tl.load(block) if IS_PER_ROW else tl.program_id(2)
    head = tl.program_id(1)
    first, end = tl.load(block + 1), tl.load(block + 2)
    count = end - first
    queries = load_block(tokens(q, row, head, first, BLOCK_Q, BLOCK_D), count, BLOCK_Q, D, BLOCK_D)
    dout_at = tokens(dout, row, head, first, BLOCK_Q, BLOCK_DV)
    out_at = tokens(out, row, head, first, BLOCK_Q, BLOCK_DV)
    dresult = load_block(dout_at, count, BLOCK_Q, DV, BLOCK_DV)
    result = load_block(out_at, count, BLOCK_Q, DV, BLOCK_DV)
    own_delta = tl.sum(dresult.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(
        numbers(delta, row, head, first, BLOCK_Q), own_delta, mask=tl.arange(0, BLOCK_Q) < count
    )
    own_lse = to_log2(load_numbers(lse, row, head, first, count, float("inf"), True, BLOCK_Q))
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes.at + row * slopes.batch + head * slopes.head) * 1.4426950408889634
    total = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for ref in range(tl.load(block + 3), tl.load(block + 4)):
        tile = tiles + tl.load(refs + ref) * 7
        low, high, shift = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
        edges = seen_range(tl.load(tile + 2), tl.load(tile + 3), first, end, low, high, BLOCK_K)
        total = differentiate_queries(
            total, queries, dresult, own_lse, own_delta, k, v, row, head // GROUP,
            first, edges, low, high, shift, slope, inner, outer,
            HAS_CAP, HAS_SLOPES, D, BLOCK_D, DV, BLOCK_DV, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
    dq_at = tokens(dq, row, head, first, BLOCK_Q, BLOCK_D)
    give_block(dq_at, total * scale, count, ADDS, BLOCK_Q, D, BLOCK_D)


@triton.jit
def differentiate_keys(
    dk, dv, k, v, q, dout, lse, delta, row, head,
    first_key, edges, low, high, shift, slope, inner, outer,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add to dk, dv or both of a block of keys from the queries of a tile that see it, of one query head."""
    index = first_key + tl.arange(0, BLOCK_K)
    for part in tl.static_range(3):
        for at in range(edges[part], edges[part + 1], BLOCK_Q):
            count = edges[part + 1] - at
            q_at = tokens(q, row, head, at, BLOCK_Q, BLOCK_D)
            dout_at = tokens(dout, row, head, at, BLOCK_Q, BLOCK_DV)
            if part == 1:
                queries = load_whole_block(q_at, D, BLOCK_D)
                dresult = load_whole_block(dout_at, DV, BLOCK_DV)
            else:
                queries = load_block(q_at, count, BLOCK_Q, D, BLOCK_D)
                dresult = load_block(dout_at, count, BLOCK_Q, DV, BLOCK_DV)
            own_lse = load_numbers(lse, row, head, at, count, float("inf"), part != 1, BLOCK_Q)
            own_lse = to_log2(own_lse)
            if OF_K and OF_V:  # loaded early: after the first product it spills registers
                own_delta = load_numbers(delta, row, head, at, count, 0.0, part != 1, BLOCK_Q)
            products = tl.dot(k, tl.trans(queries), input_precision="ieee")
            ahead = index[:, None] - (at + tl.arange(0, BLOCK_Q))[None, :]
            seen = (ahead >= low) & (ahead <= high)
            weights, bend = weigh(
                products, ahead, seen, own_lse[None, :], slope, shift, inner, outer,
                part != 1, HAS_CAP, HAS_SLOPES,
            )  # fmt: skip
            if OF_V:
                dv = tl.dot(weights.to(dresult.dtype), dresult, dv, input_precision="ieee")
            if OF_K:
                if not OF_V:
                    own_delta = load_numbers(delta, row, head, at, count, 0.0, part != 1, BLOCK_Q)
                dweights = tl.dot(v, tl.trans(dresult), input_precision="ieee")
                dscores = weights * (dweights - own_delta[None, :]) * bend
                dk = tl.dot(dscores.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["span_start"])
def backward_keys(
    dout, q, k, v, lse, delta, dk, dv, slopes, tiles, blocks, refs, span_start, scale, inner, outer,
    GROUP: tl.constexpr, IS_PER_ROW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HEADS: tl.constexpr, ADDS: tl.constexpr,
    OF_K: tl.constexpr, OF_V: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dk, dv or both of one block of keys from its tiles and ``HEADS`` query heads of one K/V head.

    Grid: (blocks of keys, query heads / HEADS, batch rows or 1). Results start at ``span_start``.
    """
    block = blocks + tl.program_id(0) * 5
    row = tl.load(block) if IS_PER_ROW else tl.program_id(2)
    part = tl.program_id(1)
    kv_head = part * HEADS // GROUP
    first, end = tl.load(block + 1), tl.load(block + 2)
    count = end - first
    keys = load_block(tokens(k, row, kv_head, first, BLOCK_K, BLOCK_D), count, BLOCK_K, D, BLOCK_D)
    values = load_block(
        tokens(v, row, kv_head, first, BLOCK_K, BLOCK_DV), count, BLOCK_K, DV, BLOCK_DV
    )
    dkeys = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dvalues = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    for ref in range(tl.load(block + 3), tl.load(block + 4)):
        tile = tiles + tl.load(refs + ref) * 7
        low, high, shift = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
        edges = seen_range(tl.load(tile), tl.load(tile + 1), first, end, -high, -low, BLOCK_Q)
        for head in range(part * HEADS, part * HEADS + HEADS):
            slope = 0.0
            if HAS_SLOPES:
                slope = tl.load(slopes.at + row * slopes.batch + head * slopes.head)
                slope *= 1.4426950408889634
            dkeys, dvalues = differentiate_keys(
                dkeys, dvalues, keys, values, q, dout, lse, delta, row, head,
                first, edges, low, high, shift, slope, inner, outer,
                HAS_CAP, HAS_SLOPES, OF_K, OF_V, D, BLOCK_D, DV, BLOCK_DV, BLOCK_Q, BLOCK_K,
            )  # fmt: skip
    if OF_K:
        dk_at = tokens(dk, row, part, first - span_start, BLOCK_K, BLOCK_D)
        give_block(dk_at, dkeys * scale, count, ADDS, BLOCK_K, D, BLOCK_D)
    if OF_V:
        dv_at = tokens(dv, row, part, first - span_start, BLOCK_K, BLOCK_DV)
        give_block(dv_at, dvalues, count, ADDS, BLOCK_K, DV, BLOCK_DV)


@triton.jit
def merge_results(
    out, lse, new_out, new_lse, rows, positions, count,
    IS_SCATTERED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the results of a block of tokens of one head into ``out`` and ``lse``, as ``kernels/merge.py``.

    Grid: (blocks of ``count`` tokens, heads, batch rows). Scattered tokens have their row and position in
    tables; their results are [1, tokens, ...].
    """
    first, head, row = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    index = first + tl.arange(0, BLOCK)
    here = index < count
    entries = tl.arange(0, BLOCK_D)
    inside = here[:, None]
    if BLOCK_D != D:
        inside = inside & (entries < D)[None, :]
    new_out_at = tokens(new_out, row, head, first, BLOCK, BLOCK_D)
    new_lse_at = numbers(new_lse, row, head, first, BLOCK)
    if IS_SCATTERED:
        own_row = tl.load(rows + index, mask=here, other=0)
        position = tl.load(positions + index, mask=here, other=0)
        own = own_row * out.batch + position * out.token + tl.cast(head, tl.int64) * out.head
        out_at = out.at + own[:, None] + entries[None, :]
        lse_at = lse.at + own_row * lse.batch + position * lse.token + head * lse.head
    else:
        out_at = tokens(out, row, head, first, BLOCK, BLOCK_D)
        lse_at = numbers(lse, row, head, first, BLOCK)
    old = tl.load(lse_at, mask=here, other=float("-inf"))
    new = tl.load(new_lse_at, mask=here, other=float("-inf"))
    larger, smaller = tl.maximum(old, new), tl.minimum(old, new)
    # Without keys on both sides, -inf - -inf would be NaN: lse and out stay.
    ratio = tl.exp(smaller - tl.where(larger == float("-inf"), 0.0, larger))
    merged = larger + tl.log(1.0 + ratio)
    weight = tl.where(new == larger, 1.0, ratio) / (1.0 + ratio)
    weight = tl.where(new == float("-inf"), 0.0, weight)
    bad = (old != old) | (new != new)  # a maximum passes over NaN, a sum does not
    merged, weight = tl.where(bad, old + new, merged), tl.where(bad, old + new, weight)[:, None]
    before = tl.load(out_at, mask=inside, other=0.0)
    after = tl.load(new_out_at, mask=inside, other=0.0).to(tl.float32)
    step = after - before
    # The nearer end first, so that a weight of 0 or 1 gives one side as it is.
    result = tl.where(weight < 0.5, before + weight * step, after - step * (1.0 - weight))
    tl.store(out_at, result, mask=inside)
    tl.store(lse_at, merged, mask=here)
