"""Device code of the forward pass: FlashAttention-2 over the tiles of a block of queries.

(Dao 2023, arXiv 2307.08691, algorithm 1.) Imported only if Triton is installed.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
import triton
import triton.language as tl

from lightning_cp.kernels.triton.scores import (
    load_block,
    load_whole_block,
    numbers,
    seen_range,
    store_block,
    tanh,
    tokens,
)


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
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * inner
            index = at + tl.arange(0, BLOCK_K)
            ahead = index[None, :] - queries[:, None]
            if HAS_CAP:
                scores = tanh(scores) * outer
            if HAS_SLOPES:
                scores -= slope * tl.abs(ahead - shift).to(tl.float32)
            if part != 1:
                seen = (ahead >= low) & (ahead <= high) & (index < edges[part + 1])[None, :]
                scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            # A query without keys so far has peak -inf, and -inf - -inf would be NaN.
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - finite[:, None])
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
