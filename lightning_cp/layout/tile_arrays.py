"""Tiles as columns of integers, so that a schedule with thousands of tiles is a few array operations.

Steps: cut the segments of all ring ranks at document boundaries (``cut_segments``), pair pieces of the
same document (``pair_pieces``), then trim each pair to its visible queries and keys, and
classify its mask (``trim_to_visible``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_cp.layout.documents import Intervals, Ints
from lightning_cp.layout.mask import UNBOUNDED, triangle
from lightning_cp.layout.sequence import SequenceLayout

KINDS: tuple[Literal["full", "causal", "band"], ...] = ("full", "causal", "band")
FULL, CAUSAL, BAND = range(3)


@dataclass(frozen=True)
class Pieces:
    """Segments cut at document boundaries, in order of (rank, local start)."""

    rank: Ints
    local_start: Ints
    global_start: Ints
    length: Ints
    document: Ints

    def of_rank(self, rank: int | None) -> Pieces:
        """Return the pieces of one rank; of every rank for ``None``."""
        if rank is None:
            return self
        keep = self.rank == rank
        return Pieces(*(getattr(self, field.name)[keep] for field in fields(self)))


@dataclass(frozen=True)
class TileArrays:
    """Tiles, one entry per tile in each column; ``kind`` indexes ``KINDS``."""

    row: Ints
    q_rank: Ints
    k_rank: Ints
    q_start: Ints
    q_len: Ints
    k_start: Ints
    k_len: Ints
    delta: Ints
    kind: Ints

    def select(self, index: npt.NDArray[Any]) -> TileArrays:
        """Return some tiles, by mask or by index."""
        return TileArrays(*(getattr(self, field.name)[index] for field in fields(self)))

    def with_columns(self, **columns: Ints) -> TileArrays:
        """Return the same tiles with some columns replaced."""
        return replace(self, **columns)

    @property
    def size(self) -> int:
        """Number of tiles."""
        return int(self.row.size)


def concat_tiles(parts: Sequence[TileArrays]) -> TileArrays:
    """Concatenate several tables of tiles."""
    if len(parts) == 1:
        return parts[0]
    return TileArrays(
        *(
            np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(TileArrays)
        )
    )


def cut_segments(layout: SequenceLayout, intervals: Intervals) -> Pieces:
    """Cut the segments of every ring rank at the boundaries of one row's documents."""
    segments = [layout.segments(rank) for rank in range(layout.ring_size)]
    counts = [segment.shape[0] for segment in segments]
    rank = np.repeat(np.arange(layout.ring_size), counts)
    table = np.concatenate(segments)
    start, length = table[:, 0], table[:, 1]
    local = np.cumsum(length) - length - rank * layout.ring_len
    first = np.searchsorted(intervals[:, 1], start, "right")
    last = np.searchsorted(intervals[:, 0], start + length, "left")
    owner, document = _flatten_ranges(first, last)
    begin = np.maximum(start[owner], intervals[document, 0])
    end = np.minimum(start[owner] + length[owner], intervals[document, 1])
    return Pieces(rank[owner], local[owner] + begin - start[owner], begin, end - begin, document)


def pair_pieces(queries: Pieces, keys: Pieces, left: int, right: int) -> tuple[Pieces, Pieces]:
    """Pair query pieces and key pieces of the same document that the bounds do not rule out."""
    order = np.argsort(keys.document, kind="stable")
    documents = keys.document[order]
    first = np.searchsorted(documents, queries.document, "left")
    last = np.searchsorted(documents, queries.document, "right")
    q_index, k_at = _flatten_ranges(first, last)
    k_index = order[k_at]
    q_first = queries.global_start[q_index]
    q_last = q_first + queries.length[q_index] - 1
    k_first = keys.global_start[k_index]
    k_last = k_first + keys.length[k_index] - 1
    visible = (k_first <= q_last + right) & (k_last >= q_first - left)
    return _take(queries, q_index[visible]), _take(keys, k_index[visible])


def trim_to_visible(pairs: tuple[Pieces, Pieces], row: int, left: int, right: int) -> TileArrays:
    """Trim each pair to the queries and keys that see each other, and classify its mask."""
    q, k = pairs
    q_first, q_end = q.global_start, q.global_start + q.length
    k_first, k_end = k.global_start, k.global_start + k.length
    q_from, q_to = np.maximum(q_first, k_first - right), np.minimum(q_end, k_end + left)
    k_from, k_to = np.maximum(k_first, q_from - left), np.minimum(k_end, q_to + right)
    behind = q_to - 1 - k_from <= left  # the farthest key back is still in the window
    ahead = k_to - 1 - q_from <= right  # the farthest key ahead is still visible
    # One token on the diagonal is full as well, but only as causal can it join a longer diagonal.
    corner = (right == 0) & (q_from == k_from) & (q_to == k_to)
    full = behind & ahead & ~corner
    kind = np.where(full, FULL, np.where(behind & (right == 0), CAUSAL, BAND))
    return TileArrays(
        row=np.full(q_from.shape, row, dtype=np.int64),
        q_rank=q.rank,
        k_rank=k.rank,
        q_start=q.local_start + q_from - q_first,
        q_len=q_to - q_from,
        k_start=k.local_start + k_from - k_first,
        k_len=k_to - k_from,
        delta=q_from - k_from,
        kind=kind.astype(np.int64),
    )


def areas(columns: TileArrays, left: int, right: int) -> Ints:
    """Count visible pairs of each uncoalesced tile."""
    full = columns.q_len * columns.k_len
    ahead = _pairs_up_to(columns, right) if right < UNBOUNDED else full
    behind = _pairs_up_to(columns, -left - 1) if left < UNBOUNDED else np.zeros_like(full)
    return ahead - behind


def _pairs_up_to(columns: TileArrays, bound: int) -> Ints:
    """Count pairs (i, j) of each tile whose key is at most ``bound`` ahead: ``j - i - delta <= bound``.

    Row i has ``clip(i + reach, 0, k_len)`` of them with ``reach = delta + bound + 1``; the sum over
    rows is a difference of triangular numbers.
    """
    reach = columns.delta + bound + 1
    rows, keys = columns.q_len, columns.k_len
    unclipped = triangle(rows + reach) - triangle(reach)
    excess = triangle(rows + reach - keys) - triangle(reach - keys)
    return unclipped - excess


def _flatten_ranges(first: npt.NDArray[np.intp], last: npt.NDArray[np.intp]) -> tuple[Ints, Ints]:
    """Flatten ranges ``first[i]..last[i]``; return the i of each entry, and the entry."""
    counts = np.maximum(last - first, 0)
    owner = np.repeat(np.arange(counts.size), counts)
    within = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, np.repeat(first, counts) + within


def _take(pieces: Pieces, index: Ints) -> Pieces:
    return Pieces(*(getattr(pieces, field.name)[index] for field in fields(pieces)))
