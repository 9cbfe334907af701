"""The schedule of an all-gather: every rank holds all keys, and each chunk of queries needs one slice.

Gathered keys lie in rank order (all of ring rank 0, then all of rank 1, ...). Put into *sequence order*
(global positions), what a chunk of queries sees lies between two positions, so that one kernel call with
one slice serves it: a causal tile then reaches from the first key of a document to the query itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from lightning_cp.layout.coalesce import coalesce
from lightning_cp.layout.columns import (
    Columns,
    concat_columns,
    keep_visible,
    pair_pieces,
    pieces_of,
)
from lightning_cp.layout.sequence import SequenceLayout
from lightning_cp.layout.tiles import ALL_ROWS, Ranges, Schedule, Tile, tiles_by_source

Execution = Literal["two_kernel", "fused"]
EXECUTIONS: tuple[str, ...] = get_args(Execution)


class KeyCall(NamedTuple):
    """One kernel call: slices of all keys in sequence order, laid end to end, and the tiles in them."""

    slices: Ranges
    tiles: tuple[Tile, ...]
    """``k_start`` counts within the slices laid end to end."""


@dataclass(frozen=True)
class GatheredSchedule:
    """The work of one ring rank once it holds every key.

    Args:
        rank_order: ranges of the rank order that, laid end to end, are the sequence order.
        two_kernel: one call per chunk of queries, with the keys that it needs.
        fused: one call for all chunks, with their slices laid end to end: keys that several chunks see
            are repeated.
    """

    rank_order: Ranges
    two_kernel: tuple[KeyCall, ...]
    fused: tuple[KeyCall, ...]

    def calls(self, execution: str) -> tuple[KeyCall, ...]:
        """The kernel calls of one way of execution."""
        return self.fused if execution == "fused" else self.two_kernel


@lru_cache(maxsize=256)
def gathered_schedule(plan: Schedule, ring_rank: int) -> GatheredSchedule:
    """The calls of one ring rank; cached, since layers and steps ask for the same ones."""
    columns = _columns(plan, ring_rank)
    ends = np.cumsum(plan.layout.segments(ring_rank)[:, 1])
    segment = np.searchsorted(ends, columns.q_start, "right")
    joins = plan.mask.joins_segments
    of_segments = (columns.select(segment == index) for index in range(ends.size))
    calls = tuple(_call(coalesce(found, joins)) for found in of_segments if found.size)
    return GatheredSchedule(_rank_order(plan.layout), calls, _fuse(calls))


def _columns(plan: Schedule, ring_rank: int) -> Columns:
    """Tiles of one rank's queries and of all keys, as if a single rank held these."""
    mask, whole = plan.mask, SequenceLayout(plan.layout.seq_len)
    parts: list[Columns] = []
    for index, (queries, intervals) in enumerate(zip(plan.pieces, plan.rows, strict=True)):
        keys = pieces_of(whole, intervals)
        pairs = pair_pieces(queries.of_rank(ring_rank), keys, mask.left, mask.right)
        row = ALL_ROWS if plan.documents.shared else index
        parts.append(keep_visible(pairs, row, mask.left, mask.right))
    return concat_columns(parts)


def _call(columns: Columns) -> KeyCall:
    start = int(columns.k_start.min())
    end = int((columns.k_start + columns.k_len).max())
    (tiles,) = tiles_by_source(columns.with_columns(k_start=columns.k_start - start), 1)
    return KeyCall(((start, end),), tiles)


def _fuse(calls: tuple[KeyCall, ...]) -> tuple[KeyCall, ...]:
    if len(calls) < 2:
        return calls
    slices = tuple(call.slices[0] for call in calls)
    lengths = [end - start for start, end in slices]
    shifts = [sum(lengths[:index]) for index in range(len(lengths))]
    tiles = (
        tile._replace(k_start=tile.k_start + shift)
        for call, shift in zip(calls, shifts, strict=True)
        for tile in call.tiles
    )
    return (KeyCall(slices, tuple(tiles)),)


def _rank_order(layout: SequenceLayout) -> Ranges:
    segments = [layout.segments(rank) for rank in range(layout.ring_size)]
    starts = np.concatenate([table[:, 0] for table in segments])
    lengths = np.concatenate([table[:, 1] for table in segments])
    places = (
        np.cumsum(lengths) - lengths
    )  # every rank has as many tokens, so this is the rank order
    order = np.argsort(starts)
    places, lengths = places[order], lengths[order]
    first = np.flatnonzero(np.concatenate([[True], places[1:] != (places + lengths)[:-1]]))
    total = np.add.reduceat(lengths, first)
    return tuple(zip(places[first].tolist(), (places[first] + total).tolist(), strict=True))
