"""Messages and bytes that one rank sends for one attention call, from the schedule's own integers.

Notation: L local tokens, B batch rows, D head dim (V may have another than q and k). A Ulysses
all-to-all sends what the *other* ranks of the group receive; the share a rank keeps never leaves it.
Formulas: per call, forward ``(U-1)/U (2A + 2K r)`` for Ulysses and keys times bytes per key for the
ring, where 2A are the bytes of the local queries and of out, 2K those of the local keys and values, and
r how often a K/V head is needed; an all-gather sends all keys to all R - 1 others, ``2K(R-1)``, and in
backward their gradients come home (Jacobs et al. 2023, arXiv 2309.14509; Liu et al. 2023, arXiv
2310.01889).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import add

from lightning_cp.errors import ConfigError
from lightning_cp.layout.heads import HeadSplit
from lightning_cp.layout.tiles import Schedule


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes sent by one rank; receives are another rank's sends."""

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
    value_dim: int | None = None,
) -> tuple[Traffic, Traffic]:
    """The bytes that ``cp_rank`` sends in (forward, backward) of one attention call.

    Args:
        plan: the schedule of the call.
        heads: how heads are split over the Ulysses ranks.
        cp_rank: ring rank times ``ulysses_size`` plus Ulysses rank.
        batch: rows of the batch.
        head_dim: entries per head of q and k.
        itemsize: bytes per entry of q, k and v.
        accumulate_itemsize: bytes per entry of accumulated gradients (4, or 8 for float64).
        exchange: ``ring`` or ``all_gather``.
        kv_heads_per_gather: of ``all_gather``.
        value_dim: entries per head of v; as many as of q and k by default.

    Raises:
        ConfigError: another exchange.
    """
    ring_rank, ulysses_rank = divmod(cp_rank, heads.ulysses_size)
    pair = batch * (head_dim + (head_dim if value_dim is None else value_dim))
    per_key = heads.num_local_kv(ulysses_rank) * pair
    if exchange == "ring":
        over_ring = _ring(plan, ring_rank, per_key, itemsize, accumulate_itemsize)
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
    # Out and dout, and one message with everything else where that may travel together.
    messages = 3 if plan.layout.ring_size > 1 else 2, 3 if wire != itemsize else 2
    forward = Traffic(messages[0], (q_and_out + kv_out) * itemsize)
    backward = Traffic(messages[1], q_and_out * itemsize + dkv_home * wire)
    return over_ring[0] + forward, over_ring[1] + backward


def _ring(
    plan: Schedule, ring_rank: int, per_key: int, itemsize: int, accumulate_itemsize: int
) -> tuple[Traffic, Traffic]:
    """K and V out in forward; K and V out again, and their gradients home, in backward."""
    rank = plan.rank(ring_rank)
    sends = sum(1 for hop in rank.hops[1:] if hop.send)
    returns = sum(1 for hop in rank.hops[1:] if hop.recv)
    keys = rank.keys_sent * per_key * itemsize
    gradients = rank.keys_received * per_key * accumulate_itemsize
    return (
        Traffic(p2p_messages=sends, p2p_bytes=keys),
        Traffic(p2p_messages=sends + returns, p2p_bytes=keys + gradients),
    )


def _all_gather(
    plan: Schedule, calls: int, per_key: int, itemsize: int, accumulate_itemsize: int
) -> tuple[Traffic, Traffic]:
    """All of a rank's keys to every other rank, in both passes; in backward the gradients of all others'."""
    if plan.layout.ring_size == 1:
        return Traffic(), Traffic()
    numbers = plan.keys_rotated * per_key
    gather = Traffic(all_gather_calls=calls, all_gather_bytes=numbers * itemsize)
    home = Traffic(reduce_scatter_calls=calls, reduce_scatter_bytes=numbers * accumulate_itemsize)
    return gather, gather + home
