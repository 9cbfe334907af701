"""Peak bytes of one rank's attention call above what it is given, from the algorithms' own integers.

Forward is given q, k and v; backward is given dout and what forward saved. What is returned, what is saved
for backward and what lives in between counts. A peak is the largest sum over the moments of a pass. Of
T tokens of a ring rank, with A bytes of their queries and P of their keys and values, A' and P' in the
accumulation dtype:

===========================  ==========================================================================
ring, forward, at a hop      keys arrived + keys arriving + own keys being sent + A' (the accumulator) +
                             a call's out
ring, backward, at a hop     keys arriving + own keys being sent + A' (dq) + P' (dkv) + either keys
                             arrived, gradients in flight both ways and the operator's own dq, dk and dv,
                             or its dk and dv and the message that is made of them
all-gather, forward          A (out) + for a block of K/V heads: all keys, the next block's, and in rank
                             order or with the accumulator and a call's out
all-gather, backward         dq, dk and dv of blocks that are done + for a block: all keys, the next
                             block's, dq and gradients of all keys in the accumulation dtype, those of the
                             block before in flight + the operator's own dq, dk and dv
Ulysses, in addition         q and P (forward) or dout (backward) by heads; around it, buffers of its
                             exchanges
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
    value_dim: int | None = None,
    one_width: bool = False,
) -> tuple[int, int]:
    """Peak bytes of ``cp_rank`` in (forward, backward) of one attention call, above what it is given.

    Args:
        plan: the schedule of the call.
        heads: how heads are split over the Ulysses ranks.
        cp_rank: ring rank times ``ulysses_size`` plus Ulysses rank.
        batch: rows of the batch.
        head_dim: entries per head of q and k.
        itemsize: bytes per entry of q, k and v.
        accumulate_itemsize: bytes per entry of accumulated results and gradients (4, or 8 for float64).
        exchange: ``ring`` or ``all_gather``.
        kv_heads_per_gather: of ``all_gather``.
        forward_execution: of ``all_gather``.
        backward_execution: of ``all_gather``.
        value_dim: entries per head of v; as many as of q and k by default.
        one_width: the kernel pads what is narrower of K and V.

    Raises:
        ConfigError: another exchange.
    """
    ring_rank, ulysses_rank = divmod(cp_rank, heads.ulysses_size)
    sizes = Sizes(
        *(batch, head_dim, head_dim if value_dim is None else value_dim),
        *(itemsize, accumulate_itemsize),
        *(heads.local_heads, heads.num_local_kv(ulysses_rank), one_width),
    )
    tokens = plan.layout.ring_len
    if exchange == "ring":
        (block,) = heads.blocks(ulysses_rank)
        hops, paired = plan.rank(ring_rank).hops, heads.ulysses_size > 1
        inside = _ring(hops, sizes.of_block(block), tokens, paired=paired)
        wide = plan.layout.ring_size > 1
        found = sizes.q(tokens, wide=wide) + sizes.kv(tokens, wide=wide)
    elif exchange == "all_gather":
        gathered = gathered_schedule(plan, ring_rank)
        blocks = heads.blocks(ulysses_rank, kv_heads_per_gather)
        found = sizes.q(tokens) + sizes.kv(tokens, wide=heads.shares_kv)
        of_blocks = [*map(sizes.of_block, blocks)]
        gather = _Gather(gathered, of_blocks, tokens, plan.layout, shares_kv=heads.shares_kv)
        inside = gather.forward(forward_execution), gather.backward(backward_execution)
    else:
        raise ConfigError(
            f"what exchange={exchange!r} allocates is another library's, and not counted. "
            "Plan with exchange='ring', which is counted."
        )
    if heads.ulysses_size == 1:
        return inside
    return _around(inside, found, sizes, heads, tokens)


def _ring(hops: Sequence[Hop], sizes: Sizes, tokens: int, *, paired: bool) -> tuple[int, int]:
    """The peaks over all hops, and over what is rounded at the end; keys may be a pair from the beginning."""
    forward: list[int] = []
    backward: list[int] = []
    accumulator, rounded = sizes.accumulator(tokens), sizes.rounds * sizes.out(tokens)
    gradients = sizes.q(tokens, wide=True) + sizes.kv(tokens, wide=True)
    for hop, after in pairwise([*hops, None]):
        assert hop is not None
        before = hops[hop.index - 1] if hop.index else None
        posted = _posted(after, sizes, paired=paired)
        queries, used = _largest(hop.tiles, sizes.batch, tokens)
        kernel = sizes.for_kernel(queries, used, backward=True)
        result = sizes.result(queries) + sizes.for_kernel(queries, used)
        if (
            before is None and len(hop.tiles) == 1
        ):  # its results are the sums, until there are others
            forward += [posted + result, posted + (after is not None) * (accumulator + rounded)]
            backward.append(posted + sizes.q(queries) + kernel)
            continue
        keys = sizes.kv(_arrived(hop)) + posted
        flying, message = (sizes.kv(n, wide=True) for n in (_in_flight(before), _arrived(hop)))
        forward.append(accumulator + keys + result)
        backward.append(gradients + keys + flying + sizes.q(queries) + kernel)
        backward.append(gradients + posted + message + kernel)
    if len(hops) > 1:
        forward.append(accumulator + sizes.kv(_arrived(hops[-1])) + rounded)
        # The first to come home widen ours: those of K, then those of V.
        widened = sizes.rounds * sizes.v(tokens)
        backward.append(gradients + sizes.kv(num_keys(hops[-1].send), wide=True) + widened)
        backward.append(gradients + sizes.rounds * (sizes.q(tokens) + sizes.kv(tokens)))
    return max(forward), sizes.lse(tokens) + max(backward)


def _arrived(hop: Hop) -> int:
    return num_keys(hop.recv) if hop.index else 0


def _posted(hop: Hop | None, sizes: Sizes, *, paired: bool) -> int:
    """Buffers of the next hop's transfer: what arrives, and what is sent if it does not lie in one piece."""
    if hop is None:
        return 0
    lies_so = paired and len(hop.send) == 1
    return sizes.kv(num_keys(hop.recv) + (0 if lies_so else num_keys(hop.send)))


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
        blocks: Sequence[Sizes],
        tokens: int,
        layout: SequenceLayout,
        *,
        shares_kv: bool,
    ) -> None:
        self._gathered = gathered
        self._blocks = blocks
        self._shares_kv = shares_kv
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
                called = _copied(call, block) + block.result(queries)
                called += block.for_kernel(queries, keys)
                peaks.append(block.kv(self._every) + around + called)
            rounded = block.rounds * block.out(self._tokens)
            peaks.append(block.kv(self._every) + around + rounded)
        return sum(block.result(self._tokens) for block in self._blocks) + max(peaks)

    def backward(self, execution: str) -> int:
        """With the gradients of the blocks that are done, which are laid side by side at the end."""
        tokens, wide = self._tokens, self._shares_kv
        queries = [block.q(tokens) for block in self._blocks]
        keys = [block.kv(tokens, wide=wide) for block in self._blocks]
        peaks: list[int] = []
        for index, block in enumerate(self._blocks):
            before = self._leaving(self._blocks[index - 1]) if index else 0
            home = sum(keys[: max(index - 1, 0)])  # those of the block before are not yet
            done = sum(queries[:index]) + home
            peaks.append(done + before + self._ordering(index))
            around = done + self._posted(index + 1) + block.kv(self._every, wide=True)
            own = block.q(tokens, wide=True) + block.kv(self._every)
            for call in self._gathered.calls(execution):
                given, asked, used = _of_call(call, block)
                kernel = block.for_kernel(asked, min(used, given), backward=True)
                results = block.q(asked) + kernel
                copied = _copied(call, block) + _copied(call, block, wide=True)
                peaks.append(around + before + own + copied + results)
            came = sum(keys[:index]) - home
            peaks.append(around + came + queries[index] + self._leaving(block))
        if len(self._blocks) > 1:
            peaks += [2 * sum(queries) + sum(keys), sum(queries) + 2 * sum(keys)]
        return max(peaks)

    def _ordering(self, index: int) -> int:
        """All keys of a block in rank order and in sequence order, while the next block arrives."""
        block = self._blocks[index]
        ordered = self._reorders * block.kv(self._every)
        return ordered + self._posted(index) + self._posted(index + 1)

    def _posted(self, index: int) -> int:
        """What arrives of a block, which what is sent is a part of."""
        return 0 if index == len(self._blocks) else self._blocks[index].kv(self._every)

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
    inside: tuple[int, int], found: int, sizes: Sizes, heads: HeadSplit, tokens: int
) -> tuple[int, int]:
    """With the exchanges of Ulysses before and after what happens over the ring axis.

    ``found`` are the gradients that come out of that. Of each exchange count what is given with what is
    sent, what is sent with what is received, and that with it put in order.
    """
    of_head = tokens // heads.ulysses_size * sizes.batch * (sizes.head_dim + sizes.value_dim)
    pair = heads.num_kv_heads * of_head
    sent = sum(heads.num_local_kv(rank) for rank in range(heads.ulysses_size)) * of_head
    q, out, kv = sizes.q(tokens), sizes.out(tokens), sizes.kv(tokens)
    before = q + sent * sizes.itemsize + q + kv
    after = q + kv + sizes.lse(tokens) + 3 * out
    wire = sizes.wide if heads.shares_kv else sizes.itemsize
    message, back = q + kv // sizes.itemsize * wire, q + sent * wire
    in_order = q + pair * wire + (wire != sizes.itemsize) * pair * sizes.itemsize
    home = max(found + message, message + back, back + in_order)
    return max(before, q + kv + inside[0], after), max(2 * out, out + inside[1], home)
