"""Dealing the chunks of a document to few ranks: a rank with a later chunk has the keys of earlier ones.

Under a causal mask a chunk of queries needs all keys of its document before it, so that a rank receives a
document's keys up to its last chunk of it, whatever other chunks of that document it is dealt.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_cp.layout.documents import Intervals

Ints = npt.NDArray[np.int64]

NONE = -1


@dataclass(frozen=True)
class Homes:
    """Of each chunk, the document that it begins in the middle of: the only one it needs other keys of."""

    document: Ints
    """Index of the document; ``NONE`` where a document, or nothing, begins."""
    behind: Ints
    """Tokens of that document before the chunk."""
    size: int
    """Tokens of a chunk."""

    @classmethod
    def of(cls, cuts: Ints, intervals: Intervals) -> Homes:
        """Of the chunks between neighbouring cuts, in one row of documents."""
        first, size = cuts[:-1], int(cuts[1] - cuts[0])
        if not intervals.size:
            return cls(np.full(first.shape, NONE), np.zeros_like(first), size)
        at = np.maximum(np.searchsorted(intervals[:, 0], first, "right") - 1, 0)
        inside = (intervals[at, 0] < first) & (first < intervals[at, 1])
        behind = np.where(inside, first - intervals[at, 0], 0)
        return cls(np.where(inside, at, NONE), behind, size)

    def keys_needed(self, owner: Ints) -> int:
        """Keys that ranks need of each other, summed over ranks."""
        chunk = np.flatnonzero(self.document != NONE)
        if not chunk.size:
            return 0
        # Sorted by (rank, document, place): what comes before the last chunk of a run is the rank's own.
        chunk = chunk[np.lexsort((chunk, self.document[chunk], owner[chunk]))]
        same = (np.diff(self.document[chunk]) == 0) & (np.diff(owner[chunk]) == 0)
        last = np.append(~same, True)
        needed = int(self.behind[chunk[last]].sum()) - self.size * int(same.sum())
        # A document begins within the chunk before its first: those keys are its owner's own.
        opening = chunk[self.behind[chunk] <= self.size]
        holds = np.zeros((owner.max() + 1, self.document.max() + 1), dtype=bool)
        holds[owner[chunk], self.document[chunk]] = True
        own = holds[owner[opening - 1], self.document[opening]]
        return needed - int(self.behind[opening[own]].sum())


def deal_near(areas: Ints, homes: Homes, ring_size: int, most: int) -> Ints:
    """Owner of each chunk: by decreasing area to a rank with its document, or to the one with the least.

    Args:
        areas: of the chunks.
        homes: the documents that they continue.
        ring_size: ranks; each gets as many chunks.
        most: area up to which a rank is given chunks for the sake of their document.
    """
    room = [areas.size // ring_size] * ring_size
    loads, owner = [0] * ring_size, [0] * areas.size
    weights: list[int] = areas.tolist()
    documents: list[int] = homes.document.tolist()
    holders: dict[int, list[int]] = {}
    waiting = [(0, rank) for rank in range(ring_size)]
    order: list[int] = np.argsort(-areas, kind="stable").tolist()
    for chunk in order:
        weight, document = weights[chunk], documents[chunk]
        with_it = holders.setdefault(document, []) if document != NONE else []
        fit = [rank for rank in with_it if room[rank] and loads[rank] + weight <= most]
        if fit:
            rank = min(fit, key=loads.__getitem__)
        else:
            while not room[waiting[0][1]] or waiting[0][0] != loads[waiting[0][1]]:
                heapq.heappop(waiting)  # full, or an older load
            rank = waiting[0][1]
            with_it.append(rank)
        owner[chunk] = rank
        room[rank] -= 1
        loads[rank] += weight
        heapq.heappush(waiting, (loads[rank], rank))
    return np.array(owner, dtype=np.int64)
