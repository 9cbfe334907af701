"""Peak bytes of one rank's attention call above what it is given, from the algorithms' own integers.

Forward is given q, k and v; backward is given dout and what forward saved. What is returned, what is saved
for backward and what lives in between counts. A peak is the largest sum over the moments of a pass. Of
T tokens of a ring rank, with A bytes of their queries and P of their keys and values, A' and P' in the
accumulation dtype:

===========================  ==========================================================================
ring, forward, at a hop      P + keys arrived + keys arriving + A' (the accumulator) + a call's out
ring, backward, at a hop     keys arrived + keys arriving + A' (dq) + P' (dkv) + gradients of the keys
                             being computed, in flight, arriving + the operator's own dq, dk and dv
all-gather, forward          P + A (out) + for a block of K/V heads: all keys, the next block's, and in
                             rank order or with the accumulator and a call's out
all-gather, backward         A' + P' + for a block: all keys, the next block's, gradients of all keys,
                             those of the block before in flight + the operator's own dq, dk and dv
Ulysses, in addition         q (forward) or dout (backward) by heads; around it, buffers of its exchanges
===========================  ==========================================================================

What an operator allocates inside itself, and scratch that does not grow with the tokens, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_cp.errors import ConfigError
from lightning_cp.layout.gathered import GatheredSchedule, KeyCall, gathered_schedule
from lightning_cp.layout.heads import HeadSplit
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.sizes import Sizes
from lightning_cp.layout.tiles import ALL_ROWS, Hop, Schedule, Tile, num_keys


def attention_memory(
    plan: Schedule,
    heads: HeadSplit,
    cp_rank: int,
    *,
    batch: int,
    head_dim: int,
    itemsize: int,
    accumulate_itemsize: int,
    exchange: str = "ring",
    kv_heads_per_gather: int | None = 1,
    forward_execution: str = "two_kernel",
    backward_execution: str = "two_kernel",
) -> tuple[int, int]:
    """Peak bytes of ``cp_rank`` in (forward, backward) of one attention call, above what it is given.

    Args:
        plan: the schedule of the call.
        heads: how heads are split over the Ulysses ranks.
        cp_rank: ring rank times ``ulysses_size`` plus Ulysses rank.
        batch: rows of the batch.
        head_dim: entries per head.
        itemsize: bytes per entry of q, k and v.
        accumulate_itemsize: bytes per entry of accumulated results and gradients (4, or 8 for float64).
        exchange: ``ring`` or ``all_gather``.
        kv_heads_per_gather: of ``all_gather``.
        forward_execution: of ``all_gather``.
        backward_execution: of ``all_gather``.

    Raises:
        ConfigError: another exchange.
    """
    ring_rank, ulysses_rank = divmod(cp_rank, heads.ulysses_size)
    sizes = Sizes(
        *(batch, head_dim, itemsize, accumulate_itemsize),
        *(heads.local_heads, heads.num_local_kv(ulysses_rank)),
    )
    tokens = plan.layout.ring_len
    if exchange == "ring":
        (block,) = heads.blocks(ulysses_rank)
        inside = _ring(plan.rank(ring_rank).hops, sizes.of_block(block), tokens)
    elif exchange == "all_gather":
        gathered = gathered_schedule(plan, ring_rank)
        blocks = heads.blocks(ulysses_rank, kv_heads_per_gather)
        gather = _Gather(gathered, sizes, [*map(sizes.of_block, blocks)], tokens, plan.layout)
        inside = gather.forward(forward_execution), gather.backward(backward_execution)
    else:
        raise ConfigError(
            f"what exchange={exchange!r} allocates is another library's, and not counted."
        )
    if heads.ulysses_size == 1:
        return inside
    return _around(inside, sizes, heads, tokens)


def _ring(hops: Sequence[Hop], sizes: Sizes, tokens: int) -> tuple[int, int]:
    """The peaks over all hops, and over what is rounded at the end."""
    forward: list[int] = []
    backward: list[int] = []
    for hop, after in pairwise([*hops, None]):
        assert hop is not None
        before = hops[hop.index - 1] if hop.index else None
        keys = sizes.kv(_arrived(hop)) + _posted(after, sizes)
        queries, used = _largest(hop.tiles, sizes.batch, tokens)
        adopted = (
            before is None and not sizes.rounds
        )  # the first call's out becomes the accumulator
        forward.append(keys + sizes.result(0 if adopted else queries) + sizes.for_kernel(used))
        home = sizes.kv(_arrived(hop) + _in_flight(before), wide=True)
        own = sizes.q(queries) + sizes.for_kernel(used, backward=True)
        backward.append(keys + home + own)
    rounded = sizes.rounds * sizes.q(tokens)
    forward.append(sizes.kv(_arrived(hops[-1])) + rounded)
    backward.append(rounded + sizes.rounds * sizes.kv(tokens))
    gradients = sizes.q(tokens, wide=True) + sizes.kv(tokens, wide=True)
    return (
        sizes.kv(tokens) + sizes.accumulator(tokens) + max(forward),
        gradients + sizes.lse(tokens) + max(backward),
    )


def _arrived(hop: Hop) -> int:
    return num_keys(hop.recv) if hop.index else 0


def _posted(hop: Hop | None, sizes: Sizes) -> int:
    """Buffers of the next hop's transfer: what arrives, and what is sent if it lies in several ranges."""
    if hop is None:
        return 0
    return sizes.kv(num_keys(hop.recv) + (num_keys(hop.send) if len(hop.send) > 1 else 0))


def _in_flight(hop: Hop | None) -> int:
    """Keys whose gradients travel while the next hop is computed: to their owner, and to us."""
    return num_keys(hop.recv) + num_keys(hop.send) if hop is not None and hop.index else 0


def _largest(tiles: Sequence[Tile], batch: int, tokens: int) -> tuple[int, int]:
    """Queries and keys of a kernel call that takes all tiles at once, per row of the batch."""
    rows = [batch if tile.row == ALL_ROWS else 1 for tile in tiles]
    queries = sum(r * tile.q_len for r, tile in zip(rows, tiles, strict=True))
    keys = sum(r * tile.k_len for r, tile in zip(rows, tiles, strict=True))
    reach = max((tile.k_start + tile.k_len for tile in tiles), default=0)
    return min(-(-queries // batch), tokens), min(-(-keys // batch), reach)


class _Gather:
    """The peaks over all blocks of heads, whose keys are gathered one block ahead."""

    def __init__(
        self,
        gathered: GatheredSchedule,
        sizes: Sizes,
        blocks: Sequence[Sizes],
        tokens: int,
        layout: SequenceLayout,
    ) -> None:
        self._gathered = gathered
        self._sizes = sizes
        self._blocks = blocks
        self._tokens = tokens
        self._every = layout.ring_len * layout.ring_size
        self._reorders = len(gathered.rank_order) > 1

    def forward(self, execution: str) -> int:
        """With ``out`` and ``lse`` of all heads, into which each block is put."""
        peaks: list[int] = []
        for index, block in enumerate(self._blocks):
            peaks.append(self._ordering(index))
            around = self._posted(index + 1) + block.accumulator(self._tokens)
            for call in self._gathered.calls(execution):
                keys, queries, _ = _of_call(call, block)
                called = _copied(call, block) + block.result(queries) + block.for_kernel(keys)
                peaks.append(block.kv(self._every) + around + called)
            rounded = block.rounds * block.q(self._tokens)
            peaks.append(block.kv(self._every) + around + rounded)
        kept = self._sizes.kv(self._tokens) + self._sizes.result(self._tokens)
        return kept + max(peaks)

    def backward(self, execution: str) -> int:
        """With the gradients of all heads of this rank's tokens, which are rounded at the end."""
        sizes, peaks = self._sizes, [0]
        for index, block in enumerate(self._blocks):
            leaving = self._leaving(self._blocks[index - 1]) if index else 0
            peaks.append(self._ordering(index) + leaving)
            around = self._posted(index + 1) + block.kv(self._every, wide=True)
            for call in self._gathered.calls(execution):
                keys, queries, used = _of_call(call, block)
                own = block.q(queries) + block.for_kernel(min(used, keys), backward=True)
                copied = _copied(call, block) + _copied(call, block, wide=True)
                peaks.append(block.kv(self._every) + around + leaving + copied + own)
            peaks.append(around + self._leaving(block))
        peaks.append(sizes.rounds * (sizes.q(self._tokens) + sizes.kv(self._tokens)))
        gradients = sizes.q(self._tokens, wide=True) + sizes.kv(self._tokens, wide=True)
        return gradients + max(peaks)

    def _ordering(self, index: int) -> int:
        """All keys of a block in rank order and in sequence order, while the next block arrives."""
        block = self._blocks[index]
        ordered = self._reorders * block.kv(self._every)
        return ordered + self._posted(index) + self._posted(index + 1)

    def _posted(self, index: int) -> int:
        """What arrives of a block, and what is sent where that is not all heads."""
        if index == len(self._blocks):
            return 0
        sent = self._tokens if len(self._blocks) > 1 else 0
        return self._blocks[index].kv(self._every + sent)

    def _leaving(self, block: Sizes) -> int:
        """Gradients of all keys on their way home in rank order, and what comes in of our own."""
        return block.kv(self._reorders * self._every + self._tokens, wide=True)


def _of_call(call: KeyCall, block: Sizes) -> tuple[int, int, int]:
    """Keys that it is given, and queries and keys that its tiles name."""
    tokens = sum(tile.q_len for tile in call.tiles)
    return num_keys(call.slices), *_largest(call.tiles, block.batch, tokens)


def _copied(call: KeyCall, block: Sizes, *, wide: bool = False) -> int:
    """Several slices laid end to end."""
    return block.kv(num_keys(call.slices), wide=wide) if len(call.slices) > 1 else 0


def _around(
    inside: tuple[int, int], sizes: Sizes, heads: HeadSplit, tokens: int
) -> tuple[int, int]:
    """With the exchanges of Ulysses before and after what happens over the ring axis."""
    of_head = tokens // heads.ulysses_size * sizes.batch * sizes.head_dim
    pair = 2 * heads.num_kv_heads * of_head
    sent = 2 * sum(heads.num_local_kv(rank) for rank in range(heads.ulysses_size)) * of_head
    q, kv, dkv = sizes.q(tokens), sizes.kv(tokens), sizes.kv(tokens, wide=True)
    # Each exchange: what is sent, what is received, and that put in order.
    before = 2 * q + (pair + sent) * sizes.itemsize + kv
    after = q + kv + sizes.lse(tokens) + 3 * q
    wire = sizes.wide if heads.shares_kv else sizes.itemsize
    rounded = 0 if heads.shares_kv else sizes.rounds * kv
    keys = (
        q + dkv + rounded + (sent + pair) * wire + (wire != sizes.itemsize) * pair * sizes.itemsize
    )
    return max(before, q + inside[0], after), max(2 * q, q + inside[1], 3 * q + dkv, keys)
