"""The schedule: which rectangles of (queries, keys) each ring rank computes, and which keys travel.

Interval arithmetic over segments, documents, causality and window gives tiles. The kernels execute
them, the exchange sends exactly the key ranges they name, and work and bytes are sums over them.

A rank's *hop* h covers the keys of ring rank ``(rank - h) % ring_size``; hop 0 is local. Keys go
straight from their owner to the rank that needs them, and only the ranges that some tile touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_cp.errors import ShapeError
from lightning_cp.layout.coalesce import coalesce
from lightning_cp.layout.columns import (
    KINDS,
    Columns,
    Pieces,
    areas,
    concat_columns,
    keep_visible,
    pair_pieces,
    pieces_of,
)
from lightning_cp.layout.documents import Documents, Intervals
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.ranges import merged
from lightning_cp.layout.sequence import SequenceLayout

T = TypeVar("T")

ALL_ROWS = -1
"""``Tile.row`` of a tile that holds for every row of the batch."""

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint (start, end) ranges of a rank's local keys."""


class Tile(NamedTuple):
    """One rectangle of attention, in local coordinates of the query rank and of the key rank.

    ``delta`` is the global query position minus the global key position at the tile's origin. In
    tile coordinates query i sees key j of a ``causal`` tile iff ``j <= i + delta``, of a ``band``
    tile iff ``-left <= j - i - delta <= right``, and of a ``full`` tile always. Joined tiles keep
    the ``delta`` of their first part, and are only made where distance does not matter.
    """

    row: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    delta: int
    mask: Literal["full", "causal", "band"]


@dataclass(frozen=True)
class Hop:
    """The work of one rank on the keys of one other rank."""

    index: int
    source: int
    dest: int
    tiles: tuple[Tile, ...]
    recv: Ranges
    """Key ranges of ``source`` that the tiles touch."""
    send: Ranges
    """Key ranges of our own that ``dest`` needs at the same hop."""

    @cached_property
    def packed_tiles(self) -> tuple[Tile, ...]:
        """The tiles with ``k_start`` counted in the received ranges laid end to end."""
        starts = np.array([start for start, _ in self.recv], dtype=np.int64)
        sizes = np.array([end - start for start, end in self.recv], dtype=np.int64)
        shift = np.cumsum(sizes) - sizes - starts
        packed: list[Tile] = []
        for tile in self.tiles:
            at = int(np.searchsorted(starts, tile.k_start, "right")) - 1
            packed.append(tile._replace(k_start=tile.k_start + int(shift[at])))
        return tuple(packed)

    @property
    def idle(self) -> bool:
        """True if nothing is computed and nothing is sent."""
        return not self.tiles and not self.send


def num_keys(ranges: Ranges) -> int:
    """Keys in a list of ranges."""
    return sum(end - start for start, end in ranges)


@dataclass(frozen=True)
class RankSchedule:
    """Everything one ring rank computes, receives and sends for one attention call."""

    ring_rank: int
    hops: tuple[Hop, ...]
    """One per hop, hop 0 (local) first; idle hops are kept, so that ``hops[h].index == h``."""

    @property
    def num_tiles(self) -> int:
        """Tiles of all hops."""
        return sum(len(hop.tiles) for hop in self.hops)

    @property
    def keys_sent(self) -> int:
        """Keys of our own that other ranks receive, counted once per receiver."""
        return sum(num_keys(hop.send) for hop in self.hops[1:])

    @property
    def keys_received(self) -> int:
        """Keys of other ranks that we receive."""
        return sum(num_keys(hop.recv) for hop in self.hops[1:])


class Schedule:
    """The schedule of all ring ranks; one rank's part is made when it is asked for, then kept."""

    def __init__(self, layout: SequenceLayout, documents: Documents, mask: Mask) -> None:
        self.layout = layout
        self.documents = documents
        self.mask = mask
        self._ranks: dict[int, RankSchedule] = {}

    def rank(self, ring_rank: int) -> RankSchedule:
        """Tiles per hop and exchanged key ranges of one ring rank."""
        if ring_rank not in self._ranks:
            self._ranks[ring_rank] = self._make_rank(ring_rank)
        return self._ranks[ring_rank]

    @cached_property
    def pairs(self) -> npt.NDArray[np.int64]:
        """``[query rank, key rank]``: visible (query, key) pairs, summed over the rows given."""
        columns = self._all
        totals = np.zeros((self.layout.ring_size,) * 2, dtype=np.int64)
        counted = areas(columns, self.mask.left, self.mask.right)
        np.add.at(totals, (columns.q_rank, columns.k_rank), counted)
        return totals * (self.documents.num_rows if self.documents.shared else 1)

    @cached_property
    def keys(self) -> npt.NDArray[np.int64]:
        """``[query rank, key rank]``: keys of the one that the other needs; they travel for all rows."""
        columns, size = self._all, self.layout.ring_size
        both = columns.q_rank * size + columns.k_rank
        owner, begin, end = merged(both, columns.k_start, columns.k_len, self.layout.ring_len + 1)
        totals = np.zeros(size * size, dtype=np.int64)
        np.add.at(totals, owner, end - begin)
        return totals.reshape(size, size)

    @property
    def work(self) -> tuple[int, ...]:
        """Visible (query, key) pairs of each ring rank, summed over the rows given."""
        return tuple(self.pairs.sum(axis=1).tolist())

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean; 1.0 is perfect."""
        total = sum(self.work)
        return max(self.work) * len(self.work) / total if total else 1.0

    @property
    def keys_rotated(self) -> int:
        """Keys that each rank would send if whole shards went round the ring instead."""
        return (self.layout.ring_size - 1) * self.layout.ring_len

    def _make_rank(self, rank: int) -> RankSchedule:
        size = self.layout.ring_size
        ours = coalesce(self._tiles(rank, None), joins_segments=self.mask.joins_segments)
        theirs = self._tiles(None, rank)
        tiles = tiles_by_source(ours, size)
        received = _ranges_by_rank(ours.k_rank, ours, self.layout)
        needed = _ranges_by_rank(theirs.q_rank, theirs, self.layout)
        hops: list[Hop] = []
        for index in range(size):
            source, dest = (rank - index) % size, (rank + index) % size
            send = needed[dest] if index else ()
            hops.append(Hop(index, source, dest, tiles[source], received[source], send))
        return RankSchedule(rank, tuple(hops))

    @property
    def rows(self) -> tuple[Intervals, ...]:
        """The documents of every row; of one row if all are equal."""
        return self.documents.rows[:1] if self.documents.shared else self.documents.rows

    @cached_property
    def pieces(self) -> tuple[Pieces, ...]:
        """The pieces of every rank, for each of ``rows``."""
        return tuple(pieces_of(self.layout, intervals) for intervals in self.rows)

    @cached_property
    def _all(self) -> Columns:
        return self._tiles(None, None)

    def _tiles(self, q_rank: int | None, k_rank: int | None) -> Columns:
        """Uncoalesced tiles between one (or every, ``None``) query rank and key rank."""
        parts: list[Columns] = []
        for index, pieces in enumerate(self.pieces):
            pairs = pair_pieces(
                pieces.of_rank(q_rank), pieces.of_rank(k_rank), self.mask.left, self.mask.right
            )
            row = ALL_ROWS if self.documents.shared else index
            parts.append(keep_visible(pairs, row, self.mask.left, self.mask.right))
        return concat_columns(parts)


@lru_cache(maxsize=128)
def schedule(layout: SequenceLayout, documents: Documents | None, mask: Mask) -> Schedule:
    """The schedule of ``layout`` under ``mask``; cached, since layers and steps ask for the same one.

    Args:
        layout: which rank holds which tokens.
        documents: intervals that attend only to themselves; ``None`` takes the layout's, and one
            document if it has none.
        mask: causality and window.

    Raises:
        ShapeError: the documents are of another length than the layout.
    """
    documents = documents or layout.documents or Documents.single(layout.seq_len)
    if documents.seq_len != layout.seq_len:
        raise ShapeError(
            f"documents describe {documents.seq_len} tokens, but the layout has {layout.seq_len}. "
            "Make both for the same sequence."
        )
    return Schedule(layout, documents, mask)


def tiles_by_source(columns: Columns, ring_size: int) -> list[tuple[Tile, ...]]:
    """One rank's tiles, by the ring rank whose keys they use."""
    order = np.lexsort((columns.k_start, columns.q_start, columns.row, columns.k_rank))
    fields: Sequence[npt.NDArray[np.int64]] = (
        columns.row,
        columns.q_start,
        columns.q_len,
        columns.k_start,
        columns.k_len,
        columns.delta,
        columns.kind,
    )
    table = np.stack([field[order] for field in fields], axis=1).tolist()
    tiles = [Tile(*numbers, mask=KINDS[kind]) for *numbers, kind in table]
    return _split(tiles, columns.k_rank[order], ring_size)


def _ranges_by_rank(
    rank: npt.NDArray[np.int64], columns: Columns, layout: SequenceLayout
) -> list[Ranges]:
    """Sorted, disjoint key ranges that the tiles touch, separately for each value of ``rank``."""
    owner, begin, end = merged(rank, columns.k_start, columns.k_len, layout.ring_len + 1)
    ranges = list(zip(begin.tolist(), end.tolist(), strict=True))
    return _split(ranges, owner, layout.ring_size)


def _split(items: list[T], rank: npt.NDArray[np.int64], size: int) -> list[tuple[T, ...]]:
    """Cut items that are sorted by ``rank`` into one tuple per rank."""
    bounds = np.searchsorted(rank, np.arange(size + 1)).tolist()
    return [tuple(items[start:end]) for start, end in pairwise(bounds)]
