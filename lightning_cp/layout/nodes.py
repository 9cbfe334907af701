"""Nodes under a ring: ranks fill one after the other, and those of a node share its network cards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_cp.layout.documents import Ints


@dataclass(frozen=True)
class Nodes:
    """Places of a ring's ranks on nodes.

    Args:
        devices: of each node.
        cards: network cards of each node, each shared by equally many neighbours.
        stride: devices from a ring rank to the next one; those between send at the same time.
        first: device of the first ring rank.
    """

    devices: int
    cards: int
    stride: int = 1
    first: int = 0

    def times(self, sent: Ints, dest: Ints, *, near: int, far: int) -> Ints:
        """Return the time of each transfer, ``[rank, hop]``.

        Between nodes it takes as long as the fuller one of both cards, which also carries what other ranks
        send at the same hop.

        Args:
            sent: ``[rank, hop]``, entries that a rank sends.
            dest: ``[rank, hop]``, the ring rank that receives them.
            near: time of an entry within a node.
            far: time of an entry on a network card.
        """
        ranks, hops = sent.shape
        rank: Ints = np.arange(ranks, dtype=np.int64)[:, None]
        between: Ints = np.arange(self.stride, dtype=np.int64)
        device = self.first + rank * self.stride + between
        node = device // self.devices
        card = node * self.cards + device % self.devices * self.cards // self.devices
        hop: Ints = np.arange(hops, dtype=np.int64)[:, None] * (int(card.max()) + 1)
        source, target = hop + card[:, None], hop + card[dest]
        crosses = node[:, None] != node[dest]
        entries = np.where(crosses, sent[..., None], 0)
        carried = np.maximum(_sums(source, entries), _sums(target, entries))
        return np.where(crosses, far * carried, near * sent[..., None]).max(axis=2)


def _sums(place: Ints, entries: Ints) -> Ints:
    """Return, for each entry, the sum of all that share its place."""
    return np.bincount(place.ravel(), weights=entries.ravel()).astype(np.int64)[place]
