"""The schedule: the tiles (rectangles of queries and keys) of each ring rank, and the keys that travel.

Interval arithmetic over segments, documents, causality and window gives tiles. The kernels execute
them, the exchange sends exactly the key ranges they name, and work and bytes are sums over them.

A rank's *hop* h covers the keys of ring rank ``(rank - h) % ring_size``; hop 0 is local. Keys travel
directly from their owner to the rank that needs them, and only in the ranges that some tile touches.
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
from lightning_cp.layout.documents import Documents, Intervals, Ints
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tile_arrays import (
    CAUSAL,
    FULL,
    KINDS,
    Pieces,
    TileArrays,
    areas,
    concat_tiles,
    cut_segments,
    pair_pieces,
    trim_to_visible,
)

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
    """Key ranges of this rank that ``dest`` needs at the same hop."""

    @cached_property
    def packed_tiles(self) -> tuple[Tile, ...]:
        """The tiles with ``k_start`` counted in the concatenated received ranges."""
        starts = np.array([start for start, _ in self.recv], dtype=np.int64)
        sizes = np.array([end - start for start, end in self.recv], dtype=np.int64)
        shift = np.cumsum(sizes) - sizes - starts
        packed: list[Tile] = []
        for tile in self.tiles:
            at = int(np.searchsorted(starts, tile.k_start, "right")) - 1
            packed.append(tile._replace(k_start=tile.k_start + int(shift[at])))
        return tuple(packed)

    @cached_property
    def num_received(self) -> int:
        """Number of keys of ``source`` that are received."""
        return num_keys(self.recv)

    @cached_property
    def num_sent(self) -> int:
        """Number of this rank's keys that are sent to ``dest``."""
        return num_keys(self.send)

    @property
    def idle(self) -> bool:
        """True if nothing is computed and nothing is sent."""
        return not self.tiles and not self.send


def num_keys(ranges: Ranges) -> int:
    """Count the keys in a list of ranges."""
    return sum([end - start for start, end in ranges])


@dataclass(frozen=True)
class RankSchedule:
    """Everything one ring rank computes, receives and sends for one attention call."""

    ring_rank: int
    hops: tuple[Hop, ...]
    """One per hop, hop 0 (local) first; includes idle hops, so that ``hops[h].index == h``."""


class Schedule:
    """The schedule of all ring ranks; makes a rank's part at its first use, and caches it."""

    def __init__(self, layout: SequenceLayout, documents: Documents, mask: Mask) -> None:
        self.layout = layout
        self.documents = documents
        self.mask = mask
        self._ranks: dict[int, RankSchedule] = {}

    def rank(self, ring_rank: int) -> RankSchedule:
        """Return the tiles per hop and exchanged key ranges of one ring rank."""
        if ring_rank not in self._ranks:
            self._ranks[ring_rank] = self._make_rank(ring_rank)
        return self._ranks[ring_rank]

    @cached_property
    def pairs(self) -> Ints:
        """``[query rank, key rank]``: visible (query, key) pairs, summed over the given rows."""
        columns = self.all_tiles
        totals = np.zeros((self.layout.ring_size,) * 2, dtype=np.int64)
        counted = areas(columns, self.mask.left, self.mask.right)
        np.add.at(totals, (columns.q_rank, columns.k_rank), counted)
        return totals * (self.documents.num_rows if self.documents.shared else 1)

    @cached_property
    def keys(self) -> Ints:
        """``[query rank, key rank]``: keys of the second that the first needs; they travel for all rows."""
        columns, size = self.all_tiles, self.layout.ring_size
        both = columns.q_rank * size + columns.k_rank
        owner, begin, end = merge_ranges(
            both, columns.k_start, columns.k_len, self.layout.ring_len + 1
        )
        totals = np.zeros(size * size, dtype=np.int64)
        np.add.at(totals, owner, end - begin)
        return totals.reshape(size, size)

    @property
    def work(self) -> tuple[int, ...]:
        """Visible (query, key) pairs of each ring rank, summed over the given rows."""
        return tuple(self.pairs.sum(axis=1).tolist())

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean; 1.0 is perfect."""
        total = sum(self.work)
        return max(self.work) * len(self.work) / total if total else 1.0

    @property
    def keys_rotated(self) -> int:
        """Keys that each rank would send if whole shards travelled around the ring instead."""
        return (self.layout.ring_size - 1) * self.layout.ring_len

    def _make_rank(self, rank: int) -> RankSchedule:
        size = self.layout.ring_size
        ours = coalesce(self._tiles(rank, None), joins_segments=self.mask.joins_segments)
        theirs = self._tiles(None, rank)
        tiles = tiles_by_source(ours, size)
        received = _key_ranges_by_rank(ours.k_rank, ours, self.layout)
        needed = _key_ranges_by_rank(theirs.q_rank, theirs, self.layout)
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
        return tuple(cut_segments(self.layout, intervals) for intervals in self.rows)

    @cached_property
    def all_tiles(self) -> TileArrays:
        """The tiles of all ranks before any are joined: each is one interval of queries and of keys."""
        return self._tiles(None, None)

    def _tiles(self, q_rank: int | None, k_rank: int | None) -> TileArrays:
        """Make uncoalesced tiles between one (or every, ``None``) query rank and key rank."""
        parts: list[TileArrays] = []
        for index, pieces in enumerate(self.pieces):
            pairs = pair_pieces(
                pieces.of_rank(q_rank), pieces.of_rank(k_rank), self.mask.left, self.mask.right
            )
            row = ALL_ROWS if self.documents.shared else index
            parts.append(trim_to_visible(pairs, row, self.mask.left, self.mask.right))
        return concat_tiles(parts)


@lru_cache(maxsize=128)
def schedule(layout: SequenceLayout, documents: Documents | None, mask: Mask) -> Schedule:
    """Return the schedule of ``layout`` under ``mask``; cached, since layers and steps share it.

    Args:
        layout: which rank holds which tokens.
        documents: intervals that attend only to themselves; ``None`` takes the layout's, or one
            document if it has none.
        mask: causality and window.

    Raises:
        ShapeError: documents and layout have different lengths.
    """
    documents = documents or layout.documents or Documents.single(layout.seq_len)
    if documents.seq_len != layout.seq_len:
        raise ShapeError(
            f"documents describe {documents.seq_len} tokens, but the layout has {layout.seq_len}. "
            "Make both for the same sequence."
        )
    return Schedule(layout, documents, mask)


def tiles_by_source(columns: TileArrays, ring_size: int) -> list[tuple[Tile, ...]]:
    """Split one rank's tiles by the ring rank whose keys they use."""
    order = np.lexsort((columns.k_start, columns.q_start, columns.row, columns.k_rank))
    fields: Sequence[Ints] = (
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


def _key_ranges_by_rank(rank: Ints, columns: TileArrays, layout: SequenceLayout) -> list[Ranges]:
    """Return the sorted, disjoint key ranges that the tiles touch, for each value of ``rank``."""
    owner, begin, end = merge_ranges(rank, columns.k_start, columns.k_len, layout.ring_len + 1)
    ranges = list(zip(begin.tolist(), end.tolist(), strict=True))
    return _split(ranges, owner, layout.ring_size)


def _split(items: list[T], rank: Ints, size: int) -> list[tuple[T, ...]]:
    """Cut items that are sorted by ``rank`` into one tuple per rank."""
    bounds = np.searchsorted(rank, np.arange(size + 1)).tolist()
    return [tuple(items[start:end]) for start, end in pairwise(bounds)]


def merge_ranges(owner: Ints, start: Ints, length: Ints, stretch: int) -> tuple[Ints, Ints, Ints]:
    """Merge ranges of each owner that overlap or meet into sorted, disjoint ones.

    Args:
        owner: of each range.
        start: of each range.
        length: of each range.
        stretch: a number above the end of every range.

    Returns:
        owner, begin and end of each merged range, sorted by owner and begin.
    """
    if not start.size:
        return start, start, start
    # All owners at once, on one line: each gets a stretch longer than its ranges reach.
    at = owner * stretch + start
    order = np.argsort(at, kind="stable")
    at = at[order]
    reach = np.maximum.accumulate(at + length[order])
    first = np.flatnonzero(np.concatenate([[True], at[1:] > reach[:-1]]))
    last = np.append(first[1:], at.size) - 1
    of = at[first] // stretch
    return of, at[first] - of * stretch, reach[last] - of * stretch


def coalesce(tiles: TileArrays, joins_segments: bool) -> TileArrays:
    """Join tiles that one kernel call can compute with the same result: zigzag then costs one per hop.

    Three passes. Full tiles side by side in keys are joined; then, where distance does not matter,
    ``causal + full + causal`` on a diagonal become one causal tile (local order is sorted, so local
    causality is global causality); then full tiles one above the other in queries are joined.

    Args:
        tiles: the tiles of one query rank.
        joins_segments: tiles from different global places may be joined; otherwise only tiles
            whose ``delta`` shows that they are neighbours globally too.
    """
    tiles = _join_along_keys(tiles, joins_segments)
    if joins_segments:
        tiles = _join_diagonals(tiles)
    return _join_along_queries(tiles, joins_segments)


def _join_along_keys(tiles: TileArrays, joins_segments: bool) -> TileArrays:
    order = np.lexsort((tiles.k_start, tiles.q_len, tiles.q_start, tiles.row, tiles.k_rank))
    t = tiles.select(order)
    same = _equal_to_previous(t.k_rank, t.row, t.q_start, t.q_len)
    touching = t.k_start[1:] == t.k_start[:-1] + t.k_len[:-1]
    continuous = t.delta[1:] == t.delta[:-1] - t.k_len[:-1]
    first, total = _merge_runs(t, same & touching, continuous | joins_segments, t.k_len)
    return t.select(first).with_columns(k_len=total)


def _join_along_queries(tiles: TileArrays, joins_segments: bool) -> TileArrays:
    order = np.lexsort((tiles.q_start, tiles.k_len, tiles.k_start, tiles.row, tiles.k_rank))
    t = tiles.select(order)
    same = _equal_to_previous(t.k_rank, t.row, t.k_start, t.k_len)
    touching = t.q_start[1:] == t.q_start[:-1] + t.q_len[:-1]
    continuous = t.delta[1:] == t.delta[:-1] + t.q_len[:-1]
    first, total = _merge_runs(t, same & touching, continuous | joins_segments, t.q_len)
    return t.select(first).with_columns(q_len=total)


def _equal_to_previous(*columns: Ints) -> npt.NDArray[np.bool_]:
    same = np.ones(max(columns[0].size - 1, 0), dtype=bool)
    for column in columns:
        same &= column[1:] == column[:-1]
    return same


def _merge_runs(
    t: TileArrays,
    neighbours: npt.NDArray[np.bool_],
    joinable: npt.NDArray[np.bool_] | bool,
    lengths: Ints,
) -> tuple[npt.NDArray[np.intp], Ints]:
    """Return the index of the first tile of each run of joinable full tiles, and the run's summed length."""
    if not t.size:
        return np.zeros(0, dtype=np.intp), lengths
    full = t.kind == FULL
    joined = neighbours & joinable & full[1:] & full[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return first, np.add.reduceat(lengths, first)


def _join_diagonals(tiles: TileArrays) -> TileArrays:
    """Grow each square causal tile by the (full, causal) pair that continues its diagonal."""
    square = (tiles.kind == CAUSAL) & (tiles.delta == 0) & (tiles.q_len == tiles.k_len)
    if square.sum() < 2:
        return tiles
    below = {
        key: index
        for index, key in enumerate(
            zip(
                tiles.k_rank.tolist(),
                tiles.row.tolist(),
                tiles.q_start.tolist(),
                tiles.q_len.tolist(),
                tiles.k_start.tolist(),
                tiles.k_len.tolist(),
                strict=True,
            )
        )
        if tiles.kind[index] == FULL
    }
    diagonal = np.flatnonzero(square)
    diagonal = diagonal[
        np.lexsort((tiles.q_start[diagonal], tiles.row[diagonal], tiles.k_rank[diagonal]))
    ]
    keep = np.ones(tiles.size, dtype=bool)
    size = tiles.q_len.copy()
    current = int(diagonal[0])
    for following in diagonal[1:].tolist():
        corner = _corner_key(tiles, size, current, following)
        index = below.get(corner) if corner is not None else None
        if index is None:
            current = following
            continue
        size[current] += tiles.q_len[following]
        keep[[index, following]] = False
    k_len = np.where(square, size, tiles.k_len)
    return concat_tiles([tiles.with_columns(q_len=size, k_len=k_len).select(keep)])


def _corner_key(
    tiles: TileArrays, size: Ints, current: int, following: int
) -> tuple[int, int, int, int, int, int] | None:
    """Return the full tile that must exist for ``following`` to continue the diagonal of ``current``."""
    grown = int(size[current])
    if (
        tiles.k_rank[current] != tiles.k_rank[following]
        or tiles.row[current] != tiles.row[following]
        or tiles.q_start[following] != tiles.q_start[current] + grown
        or tiles.k_start[following] != tiles.k_start[current] + grown
    ):
        return None
    return (
        int(tiles.k_rank[current]),
        int(tiles.row[current]),
        int(tiles.q_start[following]),
        int(tiles.q_len[following]),
        int(tiles.k_start[current]),
        grown,
    )
