"""Assignment of chunks to ring ranks, with equal token counts and balanced attention (layout ``balanced``).

The padded sequence is cut into ``ring_size * n`` equal chunks. The weight of a chunk is the number of visible
(query, key) pairs of its queries, summed over rows. Chunks are assigned by decreasing weight, each to the
rank with the least load that has room for one more (Graham's LPT rule with equal counts), so every rank gets
n. If that misses the bound, the busiest rank swaps single chunks with others. Chunks of a document stay on
one rank where that keeps the bound and fewer keys travel: a rank with a later chunk of a causal document has
the keys of the earlier ones anyway. Integers only, so that all ranks compute the same without communication.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_cp.layout.documents import Documents, Intervals, Ints
from lightning_cp.layout.mask import Mask, triangle

NO_DOCUMENT = -1

IMBALANCE_BOUND = (102, 100)
"""The sufficient imbalance (busiest rank over mean), as a fraction."""

CHUNK_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Chunks per rank to try, fewest first: more chunks need more hops and send more keys."""

MIN_CHUNK_TOKENS = 64
"""Fewest tokens of a chunk, unless there is one per rank: half a block of queries of a GPU kernel.
It also bounds the padding, at most one token per chunk and so 1/64 of the sequence."""

MAX_CHUNKS_BY_DOCUMENT = 256
"""Most chunks of all ranks for which documents stay together: so many take a millisecond, and in large rings
it saves keys on some ranks at the cost of the busiest."""


@dataclass(frozen=True)
class ChunkAssignment:
    """The chunks of each ring rank."""

    chunks: tuple[tuple[int, ...], ...]
    """Chunks of each ring rank, sorted; ranks are in order of their first chunk."""
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


def length_divisor(ring_size: int, ulysses_size: int, per_rank: int) -> int:
    """Return the divisor of the padded length, which makes chunks and Ulysses slices whole."""
    return ring_size * math.lcm(per_rank, ulysses_size)


@lru_cache(maxsize=128)
def best_assignment(
    seq_len: int, ring_size: int, ulysses_size: int, documents: Documents, mask: Mask
) -> ChunkAssignment:
    """Return the assignment with the fewest chunks within ``IMBALANCE_BOUND``, or else the most even one."""
    candidates: list[ChunkAssignment] = []
    for per_rank in useful_chunk_counts(seq_len, ring_size):
        candidates.append(
            assign_chunks(seq_len, ring_size, ulysses_size, documents, mask, per_rank)
        )
        if _is_even(candidates[-1].loads):
            return candidates[-1]
    # Totals are equal, so the busiest rank decides; the first of equals has the fewest chunks.
    return min(candidates, key=lambda found: max(found.loads))


def useful_chunk_counts(seq_len: int, ring_size: int) -> tuple[int, ...]:
    """Chunks per rank that give chunks of a useful length; one always does."""
    if ring_size == 1:
        return CHUNK_COUNTS[:1]
    most = seq_len // (ring_size * MIN_CHUNK_TOKENS)
    return tuple(count for count in CHUNK_COUNTS if count <= max(most, 1))


@lru_cache(maxsize=512)
def assign_chunks(
    seq_len: int,
    ring_size: int,
    ulysses_size: int,
    documents: Documents,
    mask: Mask,
    per_rank: int,
) -> ChunkAssignment:
    """Assign ``per_rank`` chunks to each ring rank."""
    whole = length_divisor(ring_size, ulysses_size, per_rank)
    padded_len = -(-seq_len // whole) * whole
    count = ring_size * per_rank
    cuts = np.arange(count + 1, dtype=np.int64) * (padded_len // count)
    areas = chunk_areas(cuts, documents, mask)
    owner = _swap_if_uneven(areas, _assign_largest_first(areas, ring_size), ring_size)
    one_row = len(documents.rows) == 1 or documents.shared
    if one_row and mask == Mask() and count <= MAX_CHUNKS_BY_DOCUMENT:
        owner = _prefer_fewer_keys(
            areas, ChunkDocuments.of(cuts, documents.rows[0]), owner, ring_size
        )
    return _make_chunk_assignment(areas, owner, ring_size)


def _swap_if_uneven(areas: Ints, owner: Ints, ring_size: int) -> Ints:
    """Return the owners, after swaps where these may help."""
    if not _is_even(_loads(areas, owner, ring_size)) and _may_be_even(areas, ring_size):
        _swap_chunks(areas, owner, ring_size)
    return owner


def _prefer_fewer_keys(
    areas: Ints, chunk_documents: ChunkDocuments, owner: Ints, ring_size: int
) -> Ints:
    """Return the owners for which fewer keys travel: the given ones, or with documents kept together.

    Both stay within ``IMBALANCE_BOUND``, which the second may use up.
    """
    needed = chunk_documents.keys_needed(owner)
    if not needed or not _is_even(_loads(areas, owner, ring_size)):
        return owner
    mean = -(-int(areas.sum()) // ring_size)
    near = _swap_if_uneven(
        areas, assign_by_document(areas, chunk_documents, ring_size, mean), ring_size
    )
    even = _is_even(_loads(areas, near, ring_size))
    return near if even and chunk_documents.keys_needed(near) < needed else owner


def chunk_areas(cuts: Ints, documents: Documents, mask: Mask) -> Ints:
    """Count visible pairs of the queries between neighbouring cuts, summed over rows."""
    rows = documents.rows[:1] if documents.shared else documents.rows
    upto = np.zeros(cuts.shape, dtype=np.int64)
    for intervals in rows:
        upto += _area_before(cuts, intervals, mask)
    return np.diff(upto) * (documents.num_rows if documents.shared else 1)


def _area_before(cuts: Ints, intervals: Intervals, mask: Mask) -> Ints:
    """Count visible pairs of all queries before each cut: whole documents, and part of the one it is in."""
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
    """Count visible pairs of a document's first queries.

    Query i sees keys from ``max(0, i - left)`` up to, not including, ``min(length, i + right + 1)``.
    """
    left, right = np.minimum(mask.left, length), np.minimum(mask.right + 1, length)
    ends = queries * right + triangle(queries) - triangle(queries - (length - right))
    return ends - triangle(queries - left)


def _assign_largest_first(areas: Ints, ring_size: int) -> Ints:
    """Assign chunks by decreasing area to the least loaded rank that has room; return their owners."""
    per_rank = areas.size // ring_size
    order: list[int] = np.argsort(
        -areas, kind="stable"
    ).tolist()  # stable: equal areas in order of position
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


def _swap_chunks(areas: Ints, owner: Ints, ring_size: int) -> None:
    """Swap chunks of the busiest rank with others', in place, while that lowers the larger of both loads."""
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
    most, whole = IMBALANCE_BOUND
    return max(loads) * len(loads) * whole <= sum(loads) * most


def _may_be_even(areas: Ints, ring_size: int) -> bool:
    """Return True if the rank of the heaviest chunk could meet the bound, with only the lightest besides."""
    lightest = np.sort(areas)[: areas.size // ring_size - 1]
    most, whole = IMBALANCE_BOUND
    least = int(areas.max()) + int(lightest.sum())
    return least * ring_size * whole <= int(areas.sum()) * most


def _make_chunk_assignment(areas: Ints, owner: Ints, ring_size: int) -> ChunkAssignment:
    """Order ranks by their first chunk, so that one chunk per rank is the contiguous layout."""
    chunks = [np.flatnonzero(owner == rank) for rank in range(ring_size)]
    chunks.sort(key=lambda found: int(found[0]))
    return ChunkAssignment(
        tuple(tuple(found.tolist()) for found in chunks),
        tuple(int(areas[found].sum()) for found in chunks),
    )


@dataclass(frozen=True)
class ChunkDocuments:
    """The document that each chunk begins in the middle of: the only one whose earlier keys it needs.

    Under a causal mask a chunk of queries needs all earlier keys of its document, so a rank receives a
    document's keys up to its last chunk of it, whatever other chunks of the document it has.
    """

    document: Ints
    """Index of the document; ``NO_DOCUMENT`` where a document, or nothing, begins."""
    behind: Ints
    """Tokens of that document before the chunk."""
    size: int
    """Tokens of a chunk."""

    @classmethod
    def of(cls, cuts: Ints, intervals: Intervals) -> ChunkDocuments:
        """Make it for the chunks between neighbouring cuts, in one row of documents."""
        first, size = cuts[:-1], int(cuts[1] - cuts[0])
        if not intervals.size:
            return cls(np.full(first.shape, NO_DOCUMENT), np.zeros_like(first), size)
        at = np.maximum(np.searchsorted(intervals[:, 0], first, "right") - 1, 0)
        inside = (intervals[at, 0] < first) & (first < intervals[at, 1])
        behind = np.where(inside, first - intervals[at, 0], 0)
        return cls(np.where(inside, at, NO_DOCUMENT), behind, size)

    def keys_needed(self, owner: Ints) -> int:
        """Count the keys that ranks need from each other, summed over ranks."""
        chunk = np.flatnonzero(self.document != NO_DOCUMENT)
        if not chunk.size:
            return 0
        # Sorted by (rank, document, place): the chunks before the last one of a run are the rank's own.
        chunk = chunk[np.lexsort((chunk, self.document[chunk], owner[chunk]))]
        same = (np.diff(self.document[chunk]) == 0) & (np.diff(owner[chunk]) == 0)
        last = np.append(~same, True)
        needed = int(self.behind[chunk[last]].sum()) - self.size * int(same.sum())
        # A document begins within the chunk before its first one here; that chunk's owner has those keys.
        opening = chunk[self.behind[chunk] <= self.size]
        holds = np.zeros((owner.max() + 1, self.document.max() + 1), dtype=bool)
        holds[owner[chunk], self.document[chunk]] = True
        own = holds[owner[opening - 1], self.document[opening]]
        return needed - int(self.behind[opening[own]].sum())


def assign_by_document(
    areas: Ints, chunk_documents: ChunkDocuments, ring_size: int, most: int
) -> Ints:
    """Assign chunks by decreasing area to a rank with their document, or else to the least loaded.

    Args:
        areas: of the chunks.
        chunk_documents: the documents that the chunks continue.
        ring_size: ranks; all get equally many chunks.
        most: largest load up to which a rank gets chunks of its documents.
    """
    room = [areas.size // ring_size] * ring_size
    loads, owner = [0] * ring_size, [0] * areas.size
    weights: list[int] = areas.tolist()
    documents: list[int] = chunk_documents.document.tolist()
    holders: dict[int, list[int]] = {}
    waiting = [(0, rank) for rank in range(ring_size)]
    order: list[int] = np.argsort(-areas, kind="stable").tolist()
    for chunk in order:
        weight, document = weights[chunk], documents[chunk]
        with_it = holders.setdefault(document, []) if document != NO_DOCUMENT else []
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
