"""The cost of one attention call of a layout, predicted from the schedule's integers.

The unit is the time in which a rank computes one attended (query, key) pair, all heads together. While
hop h is computed the keys of hop h+1 travel (``attention/ring.py``), so a rank takes

    sum over hops h of max(pairs of hop h, key * keys that it receives or sends for hop h+1)

plus ``hop`` for every hop at which it exchanges anything; the call takes as long as its slowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_cp.layout.heads import HeadSplit
from lightning_cp.layout.tiles import Schedule


class Heads(NamedTuple):
    """The heads of a model's attention."""

    query: int
    kv: int
    dim: int
    """Entries per head; the mean of K and V where these have different ones."""

    def of_ulysses_rank(self, ulysses_size: int) -> Heads:
        """Those that a rank computes; key/value heads are sent to every rank that uses them.

        Raises:
            ConfigError: query heads do not divide by ``ulysses_size``.
            ShapeError: query heads do not divide by key/value heads.
        """
        split = HeadSplit(self.query, self.kv, ulysses_size)
        most = max(split.num_local_kv(rank) for rank in range(ulysses_size))
        return Heads(split.local_heads, most, self.dim)


DEFAULT_HEADS = Heads(32, 8, 128)


@dataclass(frozen=True)
class CostModel:
    """The price of communication. Integers, so that all ranks decide alike.

    The defaults are for a model with 32 query and 8 key/value heads of 128 entries in two bytes, a kernel of
    600 TFLOP/s (FlashAttention-3 on an H100, MagiAttention's benchmark) and 50 GB/s between ranks (one
    400 Gbit/s InfiniBand port each): where a ring goes beyond one node, since Ulysses fills nodes first.
    Within a node, at 450 GB/s of NVLink, ``key`` is 333 (``in_node``). Backward has 2.5 times the flops and,
    with gradients in four bytes, three times the bytes: nearly the same ratio.

    Args:
        key: pairs computed in the time that one token's key and value take to travel.
        hop: pairs computed in the time that a message and a kernel launch take: 20 microseconds.
    """

    key: int = 3000
    hop: int = 732_000

    @classmethod
    def in_node(cls) -> CostModel:
        """The same model where all ranks of a ring are in one node."""
        return cls(key=333)

    @classmethod
    def gathered(cls) -> CostModel:
        """Where all keys travel to all ranks whatever the layout: only compute differs."""
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
        """From what a machine reaches and a model has.

        A pair is ``4 * heads * head_dim`` flops (a product for the score, one for the output); a token's key
        and value are ``2 * kv_heads * head_dim * itemsize`` bytes.

        Args:
            flops: floating-point operations a second of the attention kernel, forward.
            bytes_per_second: that one rank sends while it receives as much.
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

    def with_heads(self, heads: Heads) -> CostModel:
        """The same machine, where a ring rank has other heads than those of the defaults."""
        # A key is worth 2 * kv_heads * head_dim entries, a pair 4 * heads * head_dim flops; a hop takes
        # the same time whatever its heads are.
        usual = DEFAULT_HEADS
        key = self.key * (heads.kv * usual.query) / (heads.query * usual.kv)
        hop = self.hop * (usual.query * usual.dim) / (heads.query * heads.dim)
        return CostModel(round(key), round(hop))

    def cost(self, plan: Schedule) -> int:
        """Predicted time of the slowest rank, in attended pairs."""
        compute, moved = _by_hop(plan.pairs), _moved(plan)
        moved[:, 0] = 0  # a rank's own keys are there
        busy = np.maximum(compute, self.key * np.roll(moved, -1, axis=1)).sum(axis=1)
        return int((busy + self.hop * (moved > 0).sum(axis=1)).max())


def _moved(plan: Schedule) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """``[rank, hop]``: keys received or sent, whichever are more, for every row of the batch."""
    received = _by_hop(plan.keys)
    # What rank r sends at hop h is what rank r + h receives at it.
    size = plan.layout.ring_size
    rank, hop = np.ogrid[:size, :size]
    sent = plan.keys[(rank + hop) % size, rank]
    return np.maximum(received, sent) * plan.documents.num_rows


def _by_hop(
    table: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """``[rank, hop]`` from ``[query rank, key rank]``: hop h uses the keys of rank r - h."""
    size = table.shape[0]
    rank, hop = np.ogrid[:size, :size]
    return table[rank, (rank - hop) % size]
