"""Messages and bytes that one rank sends for one attention call, from the schedule's own integers.

Notation: L local tokens, B batch rows, D head dim. A Ulysses all-to-all sends what the *other*
ranks of the group receive; the share a rank keeps never leaves it. Formulas: per call, forward
``(U-1)/U (2A + 2K r)`` for Ulysses and keys times bytes per key for the ring, where A and K are the
bytes of the local queries and keys and r how often a K/V head is needed (Jacobs et al. 2023,
arXiv 2309.14509; Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cp.layout.heads import HeadSplit
from lightning_cp.layout.tiles import Schedule


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes sent by one rank; receives are another rank's sends."""

    all_to_all_calls: int = 0
    all_to_all_bytes: int = 0
    p2p_messages: int = 0
    p2p_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.all_to_all_calls + other.all_to_all_calls,
            self.all_to_all_bytes + other.all_to_all_bytes,
            self.p2p_messages + other.p2p_messages,
            self.p2p_bytes + other.p2p_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of every kind."""
        return self.all_to_all_bytes + self.p2p_bytes


def attention_traffic(
    plan: Schedule,
    heads: HeadSplit,
    cp_rank: int,
    *,
    batch: int,
    head_dim: int,
    itemsize: int,
    accumulate_itemsize: int,
) -> tuple[Traffic, Traffic]:
    """What ``cp_rank`` sends in (forward, backward) of one attention call.

    Args:
        plan: the schedule of the call.
        heads: how heads are split over the Ulysses ranks.
        cp_rank: ring rank times ``ulysses_size`` plus Ulysses rank.
        batch: rows of the batch.
        head_dim: entries per head.
        itemsize: bytes per entry of q, k and v.
        accumulate_itemsize: bytes per entry of accumulated gradients (4, or 8 for float64).
    """
    ring_rank, ulysses_rank = divmod(cp_rank, heads.ulysses_size)
    per_head = batch * head_dim
    ring_forward, ring_backward = _ring(
        plan,
        ring_rank,
        2 * heads.num_local_kv(ulysses_rank) * per_head,
        itemsize,
        accumulate_itemsize,
    )
    wire = accumulate_itemsize if heads.shares_kv else itemsize
    if heads.ulysses_size == 1:
        return ring_forward, ring_backward
    tokens = plan.layout.local_len * per_head
    others = [rank for rank in range(heads.ulysses_size) if rank != ulysses_rank]
    like_q = len(others) * heads.local_heads * tokens  # q, out, dout and dq alike
    kv_out = sum(2 * heads.num_local_kv(rank) for rank in others) * tokens
    dkv_home = len(others) * 2 * heads.num_local_kv(ulysses_rank) * tokens
    forward = Traffic(3, (2 * like_q + kv_out) * itemsize)
    backward = Traffic(3, 2 * like_q * itemsize + dkv_home * wire)
    return ring_forward + forward, ring_backward + backward


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
