"""Random layouts, documents and masks, and what they mean token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import get_args

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from typing_extensions import override

from lightning_cp.layout import ALL_ROWS, Documents, Mask, Schedule, SequenceLayout, Tile
from lightning_cp.layout.sequence import LayoutKind, Segments

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """One attention call on one layout."""

    layout: SequenceLayout
    documents: Documents
    mask: Mask

    @property
    def plan(self) -> Schedule:
        """Its schedule, made afresh so that no other example's cache is tested."""
        return Schedule(self.layout, self.documents, self.mask)


@dataclass(frozen=True)
class DealtLayout(SequenceLayout):
    """Any deal of equal chunks to ring ranks: what the schedule must cope with beyond zigzag.

    Neighbouring chunks stay segments of their own.
    """

    deal: tuple[tuple[int, ...], ...] = ()
    """The chunks of each ring rank."""

    @cached_property
    @override
    def divisor(self) -> int:
        return self.ring_size * math.lcm(len(self.deal[0]), self.ulysses_size)

    @override
    def segments(self, ring_rank: int) -> Segments:
        size = self.ring_len // len(self.deal[0])
        return np.array([(chunk * size, size) for chunk in sorted(self.deal[ring_rank])])


@st.composite
def dealt_layouts(draw: st.DrawFn, longest: int = 48) -> SequenceLayout:
    """Ring 1 to 4, Ulysses 1 or 2, 1 to 4 chunks a rank."""
    ring, ulysses, chunks = (draw(st.integers(1, most)) for most in (4, 2, 4))
    length = draw(st.integers(2 * ring * ulysses, longest))
    order = draw(st.permutations(range(ring * chunks)))
    deal = tuple(tuple(order[rank * chunks :][:chunks]) for rank in range(ring))
    return DealtLayout(length, ring, ulysses, deal=deal)


@st.composite
def layouts(
    draw: st.DrawFn, longest: int = 48, kinds: tuple[LayoutKind, ...] = get_args(LayoutKind)
) -> SequenceLayout:
    """Ring 1 to 5, Ulysses 1 to 3, every kind, from the shortest length that is allowed.

    Balanced ones have documents, a mask and 1 to 5 chunks a rank.
    """
    ring, ulysses = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    shortest = 1 if ring * ulysses == 1 else 2 * ring * ulysses
    length = draw(st.integers(shortest, max(shortest, longest)))
    kind = draw(st.sampled_from(kinds))
    if kind != "balanced":
        return SequenceLayout(length, ring, ulysses, kind)
    rows, mask, chunks = draw(documents(length)), draw(masks()), draw(st.integers(1, 5))
    return SequenceLayout(length, ring, ulysses, kind, rows, mask, chunks)


@st.composite
def intervals(draw: st.DrawFn, length: int) -> Ints:
    """Documents of one row, with gaps of padding anywhere; possibly none at all."""
    cuts = sorted(draw(st.sets(st.integers(0, length), max_size=7)) | {0, length})
    kept = draw(st.lists(st.booleans(), min_size=len(cuts) - 1, max_size=len(cuts) - 1))
    pairs = [pair for pair, keep in zip(pairwise(cuts), kept, strict=True) if keep]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


@st.composite
def documents(draw: st.DrawFn, length: int) -> Documents:
    """One document, or one to three rows of them, equal or not."""
    if draw(st.booleans()):
        return Documents.single(length)
    rows = draw(st.lists(intervals(length), min_size=1, max_size=3))
    return Documents(rows * draw(st.sampled_from([1, 1, 2])), length)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Causal or full; unbounded more often than windowed; with and without distance."""
    side = st.one_of(st.just(-1), st.integers(-1, 12))
    window = draw(st.one_of(st.just((-1, -1)), st.tuples(side, side)))
    return Mask(draw(st.booleans()), window, draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any of the above together."""
    layout = draw(st.one_of(layouts(), dealt_layouts()))
    return Case(layout, draw(documents(layout.seq_len)), draw(masks()))


def visible(case: Case) -> Bools:
    """``[rows, padded_len, padded_len]``: whether query i sees key j, by the definition."""
    length = case.layout.padded_len
    ahead = np.arange(length)[None, :] - np.arange(length)[:, None]
    left, right = case.mask.window
    seen = np.ones((length, length), dtype=bool)
    if case.mask.causal:
        seen &= ahead <= 0
    if left >= 0:
        seen &= -ahead <= left
    if right >= 0:
        seen &= ahead <= right
    rows: list[Bools] = []
    for row in case.documents.rows:
        same = np.zeros((length, length), dtype=bool)
        for start, end in row.tolist():
            same[start:end, start:end] = True
        rows.append(seen & same)
    return np.stack(rows)


def ring_positions(layout: SequenceLayout, ring_rank: int) -> Ints:
    """Global positions that a ring rank's Ulysses ranks hold together, in local order."""
    first = ring_rank * layout.ulysses_size
    ranks = range(first, first + layout.ulysses_size)
    return np.concatenate([layout.positions(rank).numpy() for rank in ranks])


def tiles_of(case: Case, plan: Schedule) -> Iterator[tuple[int, int, Tile]]:
    """(query ring rank, key ring rank, tile) of a whole schedule."""
    for rank in range(case.layout.ring_size):
        for hop in plan.rank(rank).hops:
            for tile in hop.tiles:
                yield rank, hop.source, tile


def seen_in(tile: Tile, mask: Mask) -> Bools:
    """``[q_len, k_len]``: which pairs a kernel computes for a tile, by ``Tile``'s definition."""
    ahead = np.arange(tile.k_len)[None, :] - np.arange(tile.q_len)[:, None] - tile.delta
    if tile.mask == "causal":
        return ahead <= 0
    if tile.mask == "band":
        return (ahead >= -mask.left) & (ahead <= mask.right)
    return np.ones((tile.q_len, tile.k_len), dtype=bool)


def rows_of(tile: Tile, case: Case) -> list[int]:
    """The rows that a tile is computed for."""
    return list(range(case.documents.num_rows)) if tile.row == ALL_ROWS else [tile.row]


def computed(case: Case, plan: Schedule) -> Ints:
    """``[rows, padded_len, padded_len]``: how often each pair is computed by all tiles together."""
    length = case.layout.padded_len
    counts = np.zeros((case.documents.num_rows, length, length), dtype=np.int64)
    at = [ring_positions(case.layout, rank) for rank in range(case.layout.ring_size)]
    for q_rank, k_rank, tile in tiles_of(case, plan):
        queries = at[q_rank][tile.q_start : tile.q_start + tile.q_len]
        keys = at[k_rank][tile.k_start : tile.k_start + tile.k_len]
        for row in rows_of(tile, case):
            counts[row][np.ix_(queries, keys)] += seen_in(tile, case.mask)
    return counts
