"""Device code of the backward pass: weights recomputed from the merged log-sum-exp.

With ``delta = rowsum(dout * out)``: ``dv = p' dout``, ``ds = p (dout v' - delta)``, ``dq = ds k``,
``dk = ds' q`` (Dao 2023, arXiv 2307.08691, algorithm 2). dq and delta come from programs that own
queries, then dk and dv from programs that own keys: no two add to the same place, so that the sums
have a fixed order. Imported only if Triton is installed.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
import triton
import triton.language as tl

from lightning_cp.kernels.triton.scores import (
    add_to_block,
    load_block,
    load_whole_block,
    numbers,
    seen_range,
    tanh,
    tokens,
)


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
def load_lse(lse, row, head, first, count, BLOCK: tl.constexpr):
    """Load lse in units of log2; +inf for a query without keys, which gives weights exp(s - inf) = 0."""
    x = tl.load(
        numbers(lse, row, head, first, BLOCK),
        mask=tl.arange(0, BLOCK) < count,
        other=float("inf"),
    )
    return tl.where(x == float("-inf"), float("inf"), x) * 1.4426950408889634


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
    HAS_SLOPES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add to dq of one block of queries of one head, over all its tiles; write its delta.

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
    own_lse = load_lse(lse, row, head, first, count, BLOCK_Q)
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
    add_to_block(dq_at, total * scale, count, BLOCK_Q, D, BLOCK_D)


@triton.jit
def differentiate_keys(
    dk, dv, k, v, q, dout, lse, delta, row, head,
    first_key, edges, low, high, shift, slope, inner, outer,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv of a block of keys from the queries of a tile that see it, of one query head."""
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
            own_lse = load_lse(lse, row, head, at, count, BLOCK_Q)
            own_delta = tl.load(
                numbers(delta, row, head, at, BLOCK_Q), tl.arange(0, BLOCK_Q) < count, 0.0
            )
            products = tl.dot(k, tl.trans(queries), input_precision="ieee")
            ahead = index[:, None] - (at + tl.arange(0, BLOCK_Q))[None, :]
            seen = (ahead >= low) & (ahead <= high)
            weights, bend = weigh(
                products, ahead, seen, own_lse[None, :], slope, shift, inner, outer,
                part != 1, HAS_CAP, HAS_SLOPES,
            )  # fmt: skip
            dv = tl.dot(weights.to(dresult.dtype), dresult, dv, input_precision="ieee")
            dweights = tl.dot(v, tl.trans(dresult), input_precision="ieee")
            dscores = weights * (dweights - own_delta[None, :]) * bend
            dk = tl.dot(dscores.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def backward_keys(
    dout, q, k, v, lse, delta, dk, dv, slopes, tiles, blocks, refs, scale, inner, outer,
    GROUP: tl.constexpr, IS_PER_ROW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv of one block of keys of one K/V head, over its tiles and query heads.

    Grid: (blocks of keys, K/V heads, batch rows or 1).
    """
    block = blocks + tl.program_id(0) * 5
    row = tl.load(block) if IS_PER_ROW else tl.program_id(2)
    kv_head = tl.program_id(1)
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
        for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
            slope = 0.0
            if HAS_SLOPES:
                slope = tl.load(slopes.at + row * slopes.batch + head * slopes.head)
                slope *= 1.4426950408889634
            dkeys, dvalues = differentiate_keys(
                dkeys, dvalues, keys, values, q, dout, lse, delta, row, head,
                first, edges, low, high, shift, slope, inner, outer,
                HAS_CAP, HAS_SLOPES, D, BLOCK_D, DV, BLOCK_DV, BLOCK_Q, BLOCK_K,
            )  # fmt: skip
    dk_at = tokens(dk, row, kv_head, first, BLOCK_K, BLOCK_D)
    dv_at = tokens(dv, row, kv_head, first, BLOCK_K, BLOCK_DV)
    add_to_block(dk_at, dkeys * scale, count, BLOCK_K, D, BLOCK_D)
    add_to_block(dv_at, dvalues, count, BLOCK_K, DV, BLOCK_DV)
