"""Peak bytes of one rank's attention call above its inputs, from the algorithms' own integers.

The inputs of forward are q, k and v; those of backward are dout and the tensors that forward saved. Results,
saved tensors and temporaries count. A peak is the largest sum over the moments of a pass. For T tokens of a
ring rank, with A bytes of their queries and P of their keys and values, A' and P' in the accumulation dtype:

===========================  ==========================================================================
ring, forward, at a hop      keys arrived + keys arriving + own keys being sent + A' (the accumulator) +
                             a call's out
ring, backward, at a hop     keys arriving + own keys being sent + A' (dq) + P' (dkv) + either keys
                             arrived, gradients in flight both ways and the operator's own dq, dk and dv,
                             or its dk and dv and the message made from them
all-gather, forward          A (out) + for a block of K/V heads: all keys, the next block's, and in rank
                             order or with the accumulator and a call's out
all-gather, backward         dq, dk and dv of finished blocks + for a block: all keys, the next
                             block's, dq and gradients of all keys in the accumulation dtype, those of the
                             block before in flight + the operator's own dq, dk and dv
Ulysses, in addition         q and P (forward) or dout (backward) by heads; around it, buffers of its
                             exchanges
===========================  ==========================================================================

Memory that an operator allocates internally, and scratch that does not grow with the tokens, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_cp.errors import ConfigError
from lightning_cp.layout.exchange import (
    GatheredCall,
    GatheredSchedule,
    gathered_schedule,
    ring_hops,
)
from lightning_cp.layout.heads import HeadBlock, HeadSplit
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tiles import ALL_ROWS, Hop, Schedule, Tile, num_keys


@dataclass(frozen=True)
class AttentionSizes:
    """Bytes of an attention call's tensors, by their number of tokens or keys; all rows, some heads."""

    batch: int
    head_dim: int
    """Of q and k."""
    value_dim: int
    itemsize: int
    wide: int
    """Bytes per entry of accumulators."""
    heads: int
    kv_heads: int
    one_width: bool = False
    """The kernel pads the narrower of K and V (``Capabilities.one_width``)."""
    expanded: bool = False
    """K/V heads are repeated for the kernel, since query heads straddle them."""

    @property
    def rounds(self) -> bool:
        """True if the inputs' dtype is not that of accumulation."""
        return self.wide != self.itemsize

    def of_block(self, block: HeadBlock) -> AttentionSizes:
        """Return the sizes for a block of heads."""
        heads, kv_heads = block.q[1] - block.q[0], block.kv[1] - block.kv[0]
        straddles = block.kv_of_q is not None
        return replace(self, heads=heads, kv_heads=kv_heads, expanded=straddles)

    def q(self, tokens: int, *, wide: bool = False) -> int:
        """Bytes of a tensor shaped like q."""
        return tokens * self.batch * self.heads * self.head_dim * self._item(wide)

    def out(self, tokens: int, *, wide: bool = False) -> int:
        """Bytes of a tensor shaped like out."""
        return tokens * self.batch * self.heads * self.value_dim * self._item(wide)

    def kv(self, keys: int, *, wide: bool = False) -> int:
        """Bytes of a pair of tensors shaped like k and v."""
        return keys * self.batch * self.kv_heads * self._pair * self._item(wide)

    def v(self, keys: int) -> int:
        """Bytes of a tensor shaped like v."""
        return keys * self.batch * self.kv_heads * self.value_dim * self.itemsize

    def lse(self, tokens: int) -> int:
        """Bytes of the log-sum-exp: one wide number per query and head."""
        return tokens * self.batch * self.heads * self.wide

    def result(self, tokens: int) -> int:
        """Bytes of ``out`` and ``lse`` of one kernel call."""
        return self.out(tokens) + self.lse(tokens)

    def accumulator(self, tokens: int) -> int:
        """Bytes of wide ``out`` and ``lse``."""
        return self.out(tokens, wide=True) + self.lse(tokens)

    def for_kernel(self, queries: int, keys: int, *, backward: bool = False) -> int:
        """Bytes of a call besides q, k, v and out: repeated heads, padding; in backward dk and dv."""
        padded = self._padded(queries, keys, backward=backward)
        return padded + self._of_keys(keys, backward=backward)

    def _of_keys(self, keys: int, *, backward: bool) -> int:
        repeated = keys * self.batch * self.heads * self._pair
        expanded = repeated * self.itemsize if self.expanded else 0
        if not backward:
            return expanded
        own = repeated * self.itemsize if self.expanded else self.kv(keys)
        return own + expanded + (repeated * self.wide if self.expanded else 0)

    def _padded(self, queries: int, keys: int, *, backward: bool) -> int:
        """Bytes of the padded copies of narrower tensors, and of results before they are cut."""
        if not self.one_width or self.head_dim == self.value_dim:
            return 0
        heads = self.heads if self.expanded else self.kv_heads
        of_queries, of_keys = queries * self.heads, keys * heads
        # A narrow V: v and out, in backward dout and dv too; a wide one: q and k, in backward dq and dk too.
        copies = (2 if backward else 1) * (of_queries + of_keys)
        return copies * self.batch * max(self.head_dim, self.value_dim) * self.itemsize

    @property
    def _pair(self) -> int:
        """Entries per head of K and V."""
        return self.head_dim + self.value_dim

    def _item(self, wide: bool) -> int:
        return self.wide if wide else self.itemsize


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
    """Return ``cp_rank``'s peak bytes in (forward, backward) of one attention call, above its inputs.

    Args:
        plan: the schedule of the call.
        heads: the split of heads over the Ulysses ranks.
        cp_rank: ring rank times ``ulysses_size`` plus Ulysses rank.
        batch: rows of the batch.
        head_dim: entries per head of q and k.
        itemsize: bytes per entry of q, k and v.
        accumulate_itemsize: bytes per entry of accumulated results and gradients (4, or 8 for float64).
        exchange: ``ring``, ``rotation`` or ``all_gather``.
        kv_heads_per_gather: of ``all_gather``.
        forward_execution: of ``all_gather``.
        backward_execution: of ``all_gather``.
        value_dim: entries per head of v; by default ``head_dim``.
        one_width: the kernel pads the narrower of K and V.

    Raises:
        ConfigError: another exchange.
    """
    ring_rank, ulysses_rank = divmod(cp_rank, heads.ulysses_size)
    sizes = AttentionSizes(
        *(batch, head_dim, head_dim if value_dim is None else value_dim),
        *(itemsize, accumulate_itemsize),
        *(heads.local_heads, heads.num_local_kv(ulysses_rank), one_width),
    )
    tokens = plan.layout.ring_len
    if exchange in ("ring", "rotation"):
        (block,) = heads.blocks(ulysses_rank)
        hops, paired = ring_hops(plan, ring_rank, exchange), heads.ulysses_size > 1
        rotates = exchange == "rotation"
        inside = _ring_peaks(hops, sizes.of_block(block), tokens, paired=paired, rotates=rotates)
        wide = plan.layout.ring_size > 1
        found = sizes.q(tokens, wide=wide) + sizes.kv(tokens, wide=wide)
    elif exchange == "all_gather":
        gathered = gathered_schedule(plan, ring_rank)
        blocks = heads.blocks(ulysses_rank, kv_heads_per_gather)
        found = sizes.q(tokens) + sizes.kv(tokens, wide=heads.shares_kv)
        of_blocks = [*map(sizes.of_block, blocks)]
        gather = _AllGatherPeaks(
            gathered, of_blocks, tokens, plan.layout, shares_kv=heads.shares_kv
        )
        inside = gather.forward(forward_execution), gather.backward(backward_execution)
    else:
        raise ConfigError(
            f"what exchange={exchange!r} allocates is another library's, and not counted. "
            "Plan with exchange='ring', which is counted."
        )
    if heads.ulysses_size == 1:
        return inside
    return _with_ulysses(inside, found, sizes, heads, tokens)


def _ring_peaks(
    hops: Sequence[Hop], sizes: AttentionSizes, tokens: int, *, paired: bool, rotates: bool
) -> tuple[int, int]:
    """Peaks over all hops and the final rounding; ``paired``: K and V are one tensor from the start."""
    forward: list[int] = []
    backward: list[int] = []
    accumulator, rounded = sizes.accumulator(tokens), sizes.rounds * sizes.out(tokens)
    gradients = sizes.q(tokens, wide=True) + sizes.kv(tokens, wide=True)
    for hop, after in pairwise([*hops, None]):
        assert hop is not None
        before = hops[hop.index - 1] if hop.index else None
        passed_on = rotates and before is not None  # what arrived is sent from where it is
        posted = _transfer_buffers(after, sizes, paired=paired or passed_on)
        queries, used = _call_sizes(hop.tiles, sizes.batch, tokens)
        used = max(used, rotates * _received_keys(hop))  # the kernel is given all keys
        kernel = sizes.for_kernel(queries, used, backward=True)
        result = sizes.result(queries) + sizes.for_kernel(queries, used)
        # The results of a single first call are the sums until there are others.
        if before is None and len(hop.tiles) == 1:
            forward += [posted + result, posted + (after is not None) * (accumulator + rounded)]
            backward.append(posted + sizes.q(queries) + kernel)
            continue
        keys = sizes.kv(_received_keys(hop)) + posted
        flying, message = (
            sizes.kv(n, wide=True) for n in (_in_flight(before), _received_keys(hop))
        )
        forward.append(accumulator + keys + result)
        backward.append(gradients + keys + flying + sizes.q(queries) + kernel)
        kept = keys - posted + flying if rotates else 0  # keys are sent on; others' sums are added
        backward.append(gradients + posted + kept + message + kernel)
    if len(hops) > 1:
        forward.append(accumulator + sizes.kv(_received_keys(hops[-1])) + rounded)
        # The first gradients that arrive widen this rank's: those of K, then those of V.
        widened = sizes.rounds * sizes.v(tokens)
        backward.append(gradients + sizes.kv(num_keys(hops[-1].send), wide=True) + widened)
        backward.append(gradients + sizes.rounds * (sizes.q(tokens) + sizes.kv(tokens)))
    return max(forward), sizes.lse(tokens) + max(backward)


def _received_keys(hop: Hop) -> int:
    return num_keys(hop.recv) if hop.index else 0


def _transfer_buffers(hop: Hop | None, sizes: AttentionSizes, *, paired: bool) -> int:
    """Bytes of the next hop's receive buffer, and of its send buffer unless the keys are contiguous."""
    if hop is None:
        return 0
    contiguous = paired and len(hop.send) == 1
    return sizes.kv(num_keys(hop.recv) + (0 if contiguous else num_keys(hop.send)))


def _in_flight(hop: Hop | None) -> int:
    """Keys whose gradients travel during the next hop's compute, to their owner and to this rank."""
    return num_keys(hop.recv) + num_keys(hop.send) if hop is not None and hop.index else 0


def _call_sizes(tiles: Sequence[Tile], batch: int, tokens: int) -> tuple[int, int]:
    """Queries and keys per batch row of a kernel call with all tiles."""
    rows = [batch if tile.row == ALL_ROWS else 1 for tile in tiles]
    queries = sum(r * tile.q_len for r, tile in zip(rows, tiles, strict=True))
    keys = sum(r * tile.k_len for r, tile in zip(rows, tiles, strict=True))
    reach = max((tile.k_start + tile.k_len for tile in tiles), default=0)
    return min(-(-queries // batch), tokens), min(-(-keys // batch), reach)


class _AllGatherPeaks:
    """Peaks over all blocks of heads; keys are gathered one block ahead."""

    def __init__(
        self,
        gathered: GatheredSchedule,
        blocks: Sequence[AttentionSizes],
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
        """Peak of forward, with ``out`` and ``lse`` of all heads, to which each block is copied."""
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
        """Peak of backward, with the gradients of finished blocks, which are concatenated at the end."""
        tokens, wide = self._tokens, self._shares_kv
        queries = [block.q(tokens) for block in self._blocks]
        keys = [block.kv(tokens, wide=wide) for block in self._blocks]
        peaks: list[int] = []
        for index, block in enumerate(self._blocks):
            before = self._leaving(self._blocks[index - 1]) if index else 0
            home = sum(
                keys[: max(index - 1, 0)]
            )  # those of the previous block have not arrived yet
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
        """Bytes of all keys of a block in rank order and in sequence order, while the next block arrives."""
        block = self._blocks[index]
        ordered = self._reorders * block.kv(self._every)
        return ordered + self._posted(index) + self._posted(index + 1)

    def _posted(self, index: int) -> int:
        """Bytes of a block's receive buffer, which includes the sent part."""
        return 0 if index == len(self._blocks) else self._blocks[index].kv(self._every)

    def _leaving(self, block: AttentionSizes) -> int:
        """Bytes of all keys' gradients in flight in rank order, and of the receive buffer for this rank's."""
        return block.kv(self._reorders * self._every + self._tokens, wide=True)


def _of_call(call: GatheredCall, block: AttentionSizes) -> tuple[int, int, int]:
    """Keys that a call gets, and queries and keys of its tiles."""
    tokens = sum(tile.q_len for tile in call.tiles)
    return num_keys(call.slices), *_call_sizes(call.tiles, block.batch, tokens)


def _copied(call: GatheredCall, block: AttentionSizes, *, wide: bool = False) -> int:
    """Bytes of the copy of a call's slices; 0 for a single slice, which is a view."""
    return block.kv(num_keys(call.slices), wide=wide) if len(call.slices) > 1 else 0


def _with_ulysses(
    inside: tuple[int, int], found: int, sizes: AttentionSizes, heads: HeadSplit, tokens: int
) -> tuple[int, int]:
    """Peaks including the exchanges of Ulysses before and after the part over the ring axis.

    ``found`` are the bytes of that part's gradients. An exchange has three moments: input with send buffer,
    send with receive buffer, receive buffer with the reordered result.
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
