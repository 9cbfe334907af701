"""The cost of one attention call, and the messages and bytes it sends, from the schedule's integers.

The unit of cost is the time in which a rank computes one attended (query, key) pair, all heads together. The
call takes as long as its slowest rank, by the order in which ``attention/ring.py`` posts, awaits and computes
(:mod:`lightning_cp.layout.streams`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from operator import add
from typing import NamedTuple

import numpy as np

from lightning_cp.errors import ConfigError
from lightning_cp.layout.documents import Ints
from lightning_cp.layout.exchange import ring_hops
from lightning_cp.layout.heads import HeadSplit
from lightning_cp.layout.nodes import Nodes
from lightning_cp.layout.streams import GRADIENTS, KEYS, Messages, Order, elapsed, ring_order
from lightning_cp.layout.tiles import Hop, Schedule


class HeadCounts(NamedTuple):
    """Numbers of heads of a model's attention."""

    query: int
    kv: int
    dim: int
    """Entries per head; the mean of K and V if they differ."""

    def of_ulysses_rank(self, ulysses_size: int) -> HeadCounts:
        """Return the heads of one Ulysses rank; key/value heads are sent to every rank that uses them.

        Raises:
            ConfigError: query heads do not divide by ``ulysses_size``.
            ShapeError: query heads do not divide by key/value heads.
        """
        split = HeadSplit(self.query, self.kv, ulysses_size)
        most = max(split.num_local_kv(rank) for rank in range(ulysses_size))
        return HeadCounts(split.local_heads, most, self.dim)


DEFAULT_HEADS = HeadCounts(32, 8, 128)


@dataclass(frozen=True)
class CostModel:
    """The price of communication. Integers, so that all ranks make the same choice.

    The defaults are for a model with 32 query and 8 key/value heads of 128 entries in two bytes, a kernel of
    600 TFLOP/s (FlashAttention-3 on an H100, MagiAttention's benchmark) and 50 GB/s between ranks (one
    400 Gbit/s InfiniBand port each): where a ring goes beyond one node, since Ulysses fills nodes first.
    Within a node, at 450 GB/s of NVLink, ``key`` is 333 (``in_node``). Backward has 2.5 times the flops and,
    with gradients in four bytes, three times the bytes: nearly the same ratio.

    Args:
        key: pairs computed in the time that one token's key and value take to travel.
        hop: pairs computed in the time that a message and a kernel launch take: 20 microseconds. Computing
            waits as long at every hop.
        latency: pairs computed while a message of no bytes is under way, which computing may hide.
        gradient: pairs computed in the time that the gradients of one token's key and value take.
        near: how many times faster links within nodes are, where ``nodes`` are known.
        nodes: places of the ranks; ``None``: all links are alike.
        rotates: all keys go around the ring, instead of needed ones to who needs them.
    """

    key: int = 3000
    hop: int = 732_000
    latency: int = 0
    gradient: int = 0
    near: float = 1.0
    nodes: Nodes | None = None
    rotates: bool = False

    @classmethod
    def in_node(cls) -> CostModel:
        """Return the model for rings within one node."""
        return cls(key=333)

    @classmethod
    def gathered(cls) -> CostModel:
        """Return the model of an all-gather: all keys travel to all ranks, layouts differ in compute only."""
        return cls(key=0, hop=0)

    @classmethod
    def of_machine(
        cls,
        flops: float,
        bytes_per_second: float,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        itemsize: int = 2,
        seconds_per_hop: float = 20e-6,
    ) -> CostModel:
        """Make the model from a machine's rates and a model's heads.

        A pair is ``4 * heads * head_dim`` flops (a product for the score, one for the output); a token's key
        and value are ``2 * kv_heads * head_dim * itemsize`` bytes.

        Args:
            flops: floating-point operations per second of the attention kernel, forward.
            bytes_per_second: sent by one rank, which receives as many at the same time.
            heads: query heads.
            kv_heads: key/value heads.
            head_dim: entries per head.
            itemsize: bytes per entry.
            seconds_per_hop: latency of a message and of the launch that follows.
        """
        pairs_per_second = flops / (4 * heads * head_dim)
        seconds_per_key = 2 * kv_heads * head_dim * itemsize / bytes_per_second
        return cls(
            round(seconds_per_key * pairs_per_second), round(seconds_per_hop * pairs_per_second)
        )

    def with_heads(self, heads: HeadCounts) -> CostModel:
        """Return the model of the same machine for other heads of a ring rank than the default ones."""
        # A key has 2 * kv_heads * head_dim entries, a pair 4 * heads * head_dim flops; the time of a hop does
        # not depend on its heads.
        usual = DEFAULT_HEADS
        of_key = (heads.kv * usual.query) / (heads.query * usual.kv)
        of_hop = (usual.query * usual.dim) / (heads.query * heads.dim)
        return replace(
            self,
            key=round(self.key * of_key),
            gradient=round(self.gradient * of_key),
            hop=round(self.hop * of_hop),
            latency=round(self.latency * of_hop),
        )

    def cost(self, plan: Schedule, *, backward: bool = False) -> int:
        """Predict the time of the slowest rank in one pass, in attended pairs."""
        return int(elapsed(*self.streams(plan, backward=backward)).max())

    def streams(
        self, plan: Schedule, *, backward: bool = False
    ) -> tuple[Order, Ints, dict[str, Messages]]:
        """Return the order, the computes and the messages of one pass, in attended pairs."""
        size = plan.layout.ring_size
        rank, hop = np.ogrid[:size, :size]
        source, dest = (rank - hop) % size, (rank + hop) % size
        taken, sent = plan.keys[rank, source], plan.keys[dest, rank]
        home = source
        if self.rotates:
            taken = sent = np.full_like(taken, plan.layout.ring_len)
            home = dest = np.broadcast_to((rank + 1) % size, dest.shape)
        rows = plan.documents.num_rows * (hop > 0)  # a rank's own keys are local
        messages = {KEYS: self._messages(sent * rows, dest, self.key)}
        if backward:
            messages[GRADIENTS] = self._messages(taken * rows, home, self.gradient)
        moves = np.maximum(taken, sent) * rows > 0
        computes = plan.pairs[rank, source] + self.hop * moves
        return ring_order(size, backward=backward), computes, messages

    def _messages(self, sent: Ints, dest: Ints, price: int) -> Messages:
        """Return the transfers of keys, or of their gradients, at a price for each."""
        times = price * sent
        if self.nodes is not None:
            times = self.nodes.times(sent, dest, near=round(price / self.near), far=price)
        return Messages(times + self.latency * (sent > 0), dest)


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes sent by one rank; receives count as another rank's sends."""

    all_to_all_calls: int = 0
    all_to_all_bytes: int = 0
    p2p_messages: int = 0
    p2p_bytes: int = 0
    all_gather_calls: int = 0
    all_gather_bytes: int = 0
    reduce_scatter_calls: int = 0
    reduce_scatter_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(add, astuple(self), astuple(other)))

    @property
    def total_calls(self) -> int:
        """Calls and messages of every kind."""
        return sum(
            (
                self.all_to_all_calls,
                self.p2p_messages,
                self.all_gather_calls,
                self.reduce_scatter_calls,
            )
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of every kind."""
        return sum(
            (
                self.all_to_all_bytes,
                self.p2p_bytes,
                self.all_gather_bytes,
                self.reduce_scatter_bytes,
            )
        )


def attention_traffic(
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
    key_gradients: str = "accumulate",
    value_dim: int | None = None,
) -> tuple[Traffic, Traffic]:
    """Return the traffic of ``cp_rank`` in (forward, backward) of one attention call.

    A Ulysses all-to-all sends the parts of the *other* ranks of the group. Per call in forward, Ulysses sends
    ``(U-1)/U (2A + 2K r)`` and the ring keys times bytes per key, where 2A are the bytes of the local queries
    and of out, 2K those of the local keys and values, and r the mean number of ranks that need a K/V head. An
    all-gather sends all keys to all R - 1 others, ``2K(R-1)``, and in backward their gradients come back
    (Jacobs et al. 2023, arXiv 2309.14509; Liu et al. 2023, arXiv 2310.01889).

    Args:
        plan: the schedule of the call.
        heads: the split of heads over the Ulysses ranks.
        cp_rank: ring rank times ``ulysses_size`` plus Ulysses rank.
        batch: rows of the batch.
        head_dim: entries per head of q and k.
        itemsize: bytes per entry of q, k and v.
        accumulate_itemsize: bytes per entry of accumulated gradients (4, or 8 for float64).
        exchange: ``ring``, ``rotation`` or ``all_gather``.
        kv_heads_per_gather: of ``all_gather``.
        key_gradients: of ``ring``, as in :class:`Exchange`.
        value_dim: entries per head of v; by default ``head_dim``.

    Raises:
        ConfigError: another exchange.
    """
    ring_rank, ulysses_rank = divmod(cp_rank, heads.ulysses_size)
    pair = batch * (head_dim + (head_dim if value_dim is None else value_dim))
    per_key = heads.num_local_kv(ulysses_rank) * pair
    if exchange in ("ring", "rotation"):
        hops = ring_hops(plan, ring_rank, exchange)
        wide = itemsize if key_gradients == "compute" else accumulate_itemsize
        over_ring = _ring(hops, per_key, itemsize, wide)
    elif exchange != "all_gather":
        raise ConfigError(
            f"what exchange={exchange!r} sends is another library's, and not counted. "
            "Ask for exchange='ring', which is counted."
        )
    else:
        calls = len(heads.blocks(ulysses_rank, kv_heads_per_gather))
        over_ring = _all_gather(plan, calls, per_key, itemsize, accumulate_itemsize)
    wire = accumulate_itemsize if heads.shares_kv else itemsize
    if heads.ulysses_size == 1:
        return over_ring
    pairs = plan.layout.local_len * pair
    others = [rank for rank in range(heads.ulysses_size) if rank != ulysses_rank]
    q_and_out = len(others) * heads.local_heads * pairs  # dq and dout alike
    kv_out = sum(heads.num_local_kv(rank) for rank in others) * pairs
    dkv_home = len(others) * heads.num_local_kv(ulysses_rank) * pairs
    # Messages: out or dout, and one with all other tensors where these may travel together.
    messages = 3 if plan.layout.ring_size > 1 else 2, 3 if wire != itemsize else 2
    forward = Traffic(messages[0], (q_and_out + kv_out) * itemsize)
    backward = Traffic(messages[1], q_and_out * itemsize + dkv_home * wire)
    return over_ring[0] + forward, over_ring[1] + backward


def _ring(
    hops: Sequence[Hop], per_key: int, itemsize: int, gradient_itemsize: int
) -> tuple[Traffic, Traffic]:
    """Traffic of a ring: K and V in forward; K and V again, and their returning gradients, in backward."""
    sends = sum(1 for hop in hops[1:] if hop.send)
    returns = sum(1 for hop in hops[1:] if hop.recv)
    keys = sum(hop.num_sent for hop in hops[1:]) * per_key * itemsize
    gradients = sum(hop.num_received for hop in hops[1:]) * per_key * gradient_itemsize
    return (
        Traffic(p2p_messages=sends, p2p_bytes=keys),
        Traffic(p2p_messages=sends + returns, p2p_bytes=keys + gradients),
    )


def _all_gather(
    plan: Schedule, calls: int, per_key: int, itemsize: int, accumulate_itemsize: int
) -> tuple[Traffic, Traffic]:
    """Traffic of an all-gather: keys to all others in both passes; in backward the others' gradients too."""
    if plan.layout.ring_size == 1:
        return Traffic(), Traffic()
    numbers = plan.keys_rotated * per_key
    gather = Traffic(all_gather_calls=calls, all_gather_bytes=numbers * itemsize)
    home = Traffic(reduce_scatter_calls=calls, reduce_scatter_bytes=numbers * accumulate_itemsize)
    return gather, gather + home
