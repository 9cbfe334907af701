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
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout.coalesce import coalesce
from lightning_cp.layout.columns import (
    KINDS,
    UNBOUNDED,
    Columns,
    areas,
    concat_columns,
    keep_visible,
    pair_pieces,
    pieces_of,
)
from lightning_cp.layout.documents import Documents
from lightning_cp.layout.sequence import SequenceLayout

ALL_ROWS = -1
"""``Tile.row`` of a tile that holds for every row of the batch."""

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint (start, end) ranges of a rank's local keys."""


@dataclass(frozen=True)
class Mask:
    """Who may see whom within a document: causality and a window, as in flash-attn.

    Args:
        causal: a query sees no later key.
        window: (left, right) distances still visible; -1 is unbounded.
        uses_distance: the scores depend on the distance (ALiBi, dropout), so that tiles from
            different global places must not be joined. A window implies it.
    """

    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    uses_distance: bool = False

    def __post_init__(self) -> None:
        # Configs give lists, which have no hash and equal no tuple.
        object.__setattr__(self, "window", tuple(self.window))
        if len(self.window) != 2 or any(side < -1 for side in self.window):
            raise ConfigError(
                f"window must be (left, right) distances of at least 0, or -1 for unbounded, "
                f"got {self.window}."
            )

    @property
    def left(self) -> int:
        """How far back a key may be; ``UNBOUNDED`` if any distance."""
        return UNBOUNDED if self.window[0] < 0 else self.window[0]

    @property
    def right(self) -> int:
        """How far ahead a key may be: 0 when causal; ``UNBOUNDED`` if any distance."""
        right = UNBOUNDED if self.window[1] < 0 else self.window[1]
        return min(right, 0) if self.causal else right

    @property
    def joins_segments(self) -> bool:
        """Whether tiles from different global places may be joined into one."""
        return not self.uses_distance and self.window == (-1, -1)


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
    """What one rank does with the keys of one other rank."""

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
        """Whether nothing is computed and nothing is sent."""
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
    def work(self) -> tuple[int, ...]:
        """Visible (query, key) pairs of each ring rank, summed over the rows given."""
        columns = self._tiles(None, None)
        size = self.layout.ring_size
        totals = np.zeros(size, dtype=np.int64)
        np.add.at(totals, columns.q_rank, areas(columns, self.mask.left, self.mask.right))
        rows = self.documents.num_rows if self.documents.shared else 1
        return tuple((totals * rows).tolist())

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
        hops: list[Hop] = []
        for index in range(size):
            source, dest = (rank - index) % size, (rank + index) % size
            mine = ours.select(ours.k_rank == source)
            needed = theirs.select(theirs.q_rank == dest)
            recv, send = _union(mine), (_union(needed) if index else ())
            hops.append(Hop(index, source, dest, _as_tiles(mine), recv, send))
        return RankSchedule(rank, tuple(hops))

    def _tiles(self, q_rank: int | None, k_rank: int | None) -> Columns:
        """Uncoalesced tiles between one (or every, ``None``) query rank and key rank."""
        rows = self.documents.rows[:1] if self.documents.shared else self.documents.rows
        parts: list[Columns] = []
        for index, intervals in enumerate(rows):
            pieces = pieces_of(self.layout, intervals)
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
            f"documents describe {documents.seq_len} tokens, but the layout has {layout.seq_len}."
        )
    return Schedule(layout, documents, mask)


def _as_tiles(columns: Columns) -> tuple[Tile, ...]:
    order = np.lexsort((columns.k_start, columns.q_start, columns.row))
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
    return tuple(
        Tile(row, q, m, k, n, delta, KINDS[kind]) for row, q, m, k, n, delta, kind in table
    )


def _union(columns: Columns) -> Ranges:
    """Sorted, disjoint key ranges that the tiles touch."""
    if not columns.k_start.size:
        return ()
    order = np.argsort(columns.k_start, kind="stable")
    starts = columns.k_start[order]
    reach = np.maximum.accumulate(starts + columns.k_len[order])
    opens = np.concatenate([[True], starts[1:] > reach[:-1]])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], starts.size) - 1
    return tuple(zip(starts[first].tolist(), reach[last].tolist(), strict=True))
