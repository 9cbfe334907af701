"""Dealing chunks to ring ranks so that each gets as many tokens and as much attention as the others.

The padded sequence is cut into ``ring_size * n`` equal chunks. A chunk weighs what its queries see:
visible (query, key) pairs, summed over rows. Chunks are dealt by decreasing weight, each to the rank
with the least that has room for one more (Graham's LPT rule with equal counts), so every rank gets n.
If that misses the bound, single chunks are exchanged with the busiest rank. Where chunks of a document can
be kept together (:mod:`lightning_cp.layout.near`) within the bound, and fewer keys travel, they are. Integers
only: ranks that know the documents deal alike, without talking.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_cp.layout.documents import Documents, Intervals
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.near import Homes, deal_near

Ints = npt.NDArray[np.int64]

BOUND = (102, 100)
"""The imbalance (busiest rank over mean) that is good enough, as a fraction."""

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Chunks a rank that are tried, fewest first: more chunks wake more hops and send more keys."""

SHORTEST_CHUNK = 64
"""Tokens below which a chunk is not made on its own account: half a block of queries of a GPU kernel.
It also bounds the padding, at most one token per chunk and so 1/64 of the sequence."""


MOST_NEAR = 256
"""Chunks of all ranks beyond which documents are not kept together: it takes a millisecond for so many, and
in large rings it spares some ranks keys at the cost of the busiest."""


@dataclass(frozen=True)
class Deal:
    """The rank of each chunk."""

    chunks: tuple[tuple[int, ...], ...]
    """Of each ring rank, sorted; ranks are in order of their first chunk."""
    loads: tuple[int, ...]
    """Visible pairs of each ring rank's queries, summed over rows."""

    @property
    def per_rank(self) -> int:
        """Chunks of each ring rank."""
        return len(self.chunks[0])

    @property
    def imbalance(self) -> float:
        """Load of the busiest rank over the mean; 1.0 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def grid(ring_size: int, ulysses_size: int, per_rank: int) -> int:
    """The number that the padded length is a multiple of: chunks and Ulysses slices are whole."""
    return ring_size * math.lcm(per_rank, ulysses_size)


@lru_cache(maxsize=128)
def best_deal(
    seq_len: int, ring_size: int, ulysses_size: int, documents: Documents, mask: Mask
) -> Deal:
    """The deal with the fewest chunks a rank that reaches ``BOUND``; the most even one if none does."""
    deals: list[Deal] = []
    for per_rank in useful_counts(seq_len, ring_size):
        deals.append(deal(seq_len, ring_size, ulysses_size, documents, mask, per_rank))
        if _is_even(deals[-1].loads):
            return deals[-1]
    # Totals are equal, so the busiest rank decides; the first of equals has the fewest chunks.
    return min(deals, key=lambda found: max(found.loads))


def useful_counts(seq_len: int, ring_size: int) -> tuple[int, ...]:
    """Chunks a rank that leave chunks of a useful length; one always is."""
    if ring_size == 1:
        return CHUNKS[:1]
    most = seq_len // (ring_size * SHORTEST_CHUNK)
    return tuple(count for count in CHUNKS if count <= max(most, 1))


@lru_cache(maxsize=512)
def deal(
    seq_len: int,
    ring_size: int,
    ulysses_size: int,
    documents: Documents,
    mask: Mask,
    per_rank: int,
) -> Deal:
    """Deal ``per_rank`` chunks to each ring rank."""
    whole = grid(ring_size, ulysses_size, per_rank)
    padded_len = -(-seq_len // whole) * whole
    count = ring_size * per_rank
    cuts = np.arange(count + 1, dtype=np.int64) * (padded_len // count)
    areas = chunk_areas(cuts, documents, mask)
    owner = _evened(areas, _longest_first(areas, ring_size), ring_size)
    one_row = len(documents.rows) == 1 or documents.shared
    if one_row and mask == Mask() and count <= MOST_NEAR:
        owner = _nearest(areas, Homes.of(cuts, documents.rows[0]), owner, ring_size)
    return _named(areas, owner, ring_size)


def _evened(areas: Ints, owner: Ints, ring_size: int) -> Ints:
    """The owners, after exchanges where these may help."""
    if not _is_even(_loads(areas, owner, ring_size)) and _may_be_even(areas, ring_size):
        _exchange(areas, owner, ring_size)
    return owner


def _nearest(areas: Ints, homes: Homes, owner: Ints, ring_size: int) -> Ints:
    """The deal with which fewer keys travel: the one given, or with documents kept together.

    Both within ``BOUND``, of which the second may use up what the first left.
    """
    needed = homes.keys_needed(owner)
    if not needed or not _is_even(_loads(areas, owner, ring_size)):
        return owner
    mean = -(-int(areas.sum()) // ring_size)
    near = _evened(areas, deal_near(areas, homes, ring_size, mean), ring_size)
    even = _is_even(_loads(areas, near, ring_size))
    return near if even and homes.keys_needed(near) < needed else owner


def chunk_areas(cuts: Ints, documents: Documents, mask: Mask) -> Ints:
    """Visible pairs of the queries between neighbouring cuts, summed over rows."""
    rows = documents.rows[:1] if documents.shared else documents.rows
    upto = np.zeros(cuts.shape, dtype=np.int64)
    for intervals in rows:
        upto += _area_before(cuts, intervals, mask)
    return np.diff(upto) * (documents.num_rows if documents.shared else 1)


def _area_before(cuts: Ints, intervals: Intervals, mask: Mask) -> Ints:
    """Visible pairs of all queries before each cut: whole documents, and part of the one it is in."""
    if not intervals.size:
        return np.zeros(cuts.shape, dtype=np.int64)
    starts, lengths = intervals[:, 0], intervals[:, 1] - intervals[:, 0]
    whole = np.cumsum(_pairs_of_first(lengths, lengths, mask))
    at = np.searchsorted(starts, cuts, "right") - 1
    inside = np.maximum(at, 0)
    queries = np.clip(cuts - starts[inside], 0, lengths[inside])
    partial = _pairs_of_first(queries, lengths[inside], mask)
    before = np.where(at > 0, whole[inside - 1], 0)
    return before + partial


def _pairs_of_first(queries: Ints, length: Ints, mask: Mask) -> Ints:
    """Visible pairs of a document's first queries.

    Query i sees keys from ``max(0, i - left)`` up to, not including, ``min(length, i + right + 1)``.
    """
    left, right = np.minimum(mask.left, length), np.minimum(mask.right + 1, length)
    ends = queries * right + _triangle(queries) - _triangle(queries - (length - right))
    return ends - _triangle(queries - left)


def _triangle(n: Ints) -> Ints:
    """0 + 1 + ... + (n - 1) for positive n, else 0."""
    n = np.maximum(n, 0)
    return n * (n - 1) // 2


def _longest_first(areas: Ints, ring_size: int) -> Ints:
    """Owner of each chunk: by decreasing area to the rank with the least that has room."""
    per_rank = areas.size // ring_size
    order: list[int] = np.argsort(-areas, kind="stable").tolist()  # equals go in order of position
    weights: list[int] = areas.tolist()
    owner = [0] * len(order)
    waiting: list[tuple[int, int, int]] = [(0, rank, 0) for rank in range(ring_size)]
    for chunk in order:
        load, rank, held = waiting[0]
        owner[chunk] = rank
        if held + 1 < per_rank:
            heapq.heapreplace(waiting, (load + weights[chunk], rank, held + 1))
        else:
            heapq.heappop(waiting)
    return np.array(owner, dtype=np.int64)


def _exchange(areas: Ints, owner: Ints, ring_size: int) -> None:
    """Swap a chunk of the busiest rank with another's, while that lowers the larger of the two loads."""
    for _ in range(ring_size):  # a bound on the time; a few are enough
        loads = np.array(_loads(areas, owner, ring_size), dtype=np.int64)
        busiest = int(np.argmax(loads))
        if _is_even(tuple(loads.tolist())):
            return
        ours, theirs = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
        moved = areas[ours][:, None] - areas[theirs][None, :]
        after = np.maximum(loads[busiest] - moved, loads[owner[theirs]][None, :] + moved)
        best = int(np.argmin(after))
        if after.flat[best] >= loads[busiest]:
            return
        give, take = ours[best // theirs.size], theirs[best % theirs.size]
        owner[give], owner[take] = owner[take], busiest


def _loads(areas: Ints, owner: Ints, ring_size: int) -> tuple[int, ...]:
    loads = np.zeros(ring_size, dtype=np.int64)
    np.add.at(loads, owner, areas)
    return tuple(loads.tolist())


def _is_even(loads: tuple[int, ...]) -> bool:
    most, whole = BOUND
    return max(loads) * len(loads) * whole <= sum(loads) * most


def _may_be_even(areas: Ints, ring_size: int) -> bool:
    """True if the rank with the heaviest chunk could keep to the bound, with the lightest beside it."""
    lightest = np.sort(areas)[: areas.size // ring_size - 1]
    most, whole = BOUND
    least = int(areas.max()) + int(lightest.sum())
    return least * ring_size * whole <= int(areas.sum()) * most


def _named(areas: Ints, owner: Ints, ring_size: int) -> Deal:
    """Ranks in order of their first chunk, so that one chunk a rank is the contiguous layout."""
    chunks = [np.flatnonzero(owner == rank) for rank in range(ring_size)]
    chunks.sort(key=lambda found: int(found[0]))
    return Deal(
        tuple(tuple(found.tolist()) for found in chunks),
        tuple(int(areas[found].sum()) for found in chunks),
    )
