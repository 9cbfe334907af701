"""What the hops send and receive, and the work of each rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.layout import (
    Documents,
    Mask,
    Schedule,
    SequenceLayout,
    Tile,
    schedule,
)
from lightning_cp.layout.tile_arrays import KINDS, areas
from lightning_cp.layout.tiles import Ranges, num_keys
from tests.helpers.layout.cases import Case, cases, layouts, ring_positions, seen_in, visible


def keys_in(ranges: Ranges) -> list[int]:
    return [key for start, end in ranges for key in range(start, end)]


@given(cases())
def test_hops_pair_up(case: Case) -> None:
    """What a rank sends at a hop is what its destination receives at the same hop."""
    plan, size = case.plan, case.layout.ring_size
    for rank in range(size):
        ours = plan.rank(rank)
        assert ours.ring_rank == rank
        assert [hop.index for hop in ours.hops] == list(range(size))
        assert ours.hops[0].send == ()
        for hop in ours.hops:
            assert hop.source == (rank - hop.index) % size
            assert hop.dest == (rank + hop.index) % size
            if hop.index:
                assert hop.send == plan.rank(hop.dest).hops[hop.index].recv


@given(cases())
def test_exactly_the_keys_that_somebody_sees_travel(case: Case) -> None:
    plan = case.plan
    seen = np.asarray(visible(case).any(axis=0))
    at = [ring_positions(case.layout, rank) for rank in range(case.layout.ring_size)]
    for rank in range(case.layout.ring_size):
        for hop in plan.rank(rank).hops:
            needed = np.flatnonzero(seen[np.ix_(at[rank], at[hop.source])].any(axis=0))
            assert keys_in(hop.recv) == needed.tolist()
            assert num_keys(hop.recv) == needed.size
            gaps = [after[0] - before[1] for before, after in pairwise(hop.recv)]
            assert all(gap > 0 for gap in gaps), "ranges that touch are one range"
            assert hop.idle == (not hop.tiles and not hop.send)


@given(cases())
def test_packed_tiles_point_at_the_same_keys(case: Case) -> None:
    plan = case.plan
    for rank in range(case.layout.ring_size):
        for hop in plan.rank(rank).hops:
            received = keys_in(hop.recv)
            for tile, packed in zip(hop.tiles, hop.packed_tiles, strict=True):
                assert packed._replace(k_start=tile.k_start) == tile
                keys = received[packed.k_start : packed.k_start + packed.k_len]
                assert keys == list(range(tile.k_start, tile.k_start + tile.k_len))


@given(cases())
def test_work_is_the_number_of_visible_pairs(case: Case) -> None:
    plan, seen = case.plan, visible(case)
    at = [ring_positions(case.layout, rank) for rank in range(case.layout.ring_size)]
    work = [int(seen[:, held].sum()) for held in at]
    assert plan.work == tuple(work)
    mean = sum(work) / len(work)
    assert plan.imbalance == pytest.approx(max(work) / mean if mean else 1.0)


@given(cases())
def test_area_is_the_number_of_pairs_a_tile_computes(case: Case) -> None:
    columns = case.plan._tiles(None, None)  # before joining, where areas are summed
    found = areas(columns, case.mask.left, case.mask.right).tolist()
    names = ("row", "q_start", "q_len", "k_start", "k_len", "delta")
    for at, area in enumerate(found):
        numbers = [int(getattr(columns, name)[at]) for name in names]
        row, q_start, q_len, k_start, k_len, delta = numbers
        kind = KINDS[int(columns.kind[at])]
        tile = Tile(row, q_start, q_len, k_start, k_len, delta, kind)
        assert area == seen_in(tile, case.mask).sum()


@given(cases())
def test_no_more_keys_travel_than_a_rotation_sends(case: Case) -> None:
    plan, size = case.plan, case.layout.ring_size
    ranks = [plan.rank(rank) for rank in range(size)]
    for rank in ranks:
        for hop in rank.hops[1:]:
            assert hop.num_received == len(keys_in(hop.recv))
            assert hop.num_sent == len(keys_in(hop.send))
        assert sum(hop.num_sent for hop in rank.hops[1:]) <= plan.keys_rotated
    assert plan.keys_rotated == (size - 1) * case.layout.ring_len


@given(st.integers(1, 8), st.integers(1, 6))
def test_zigzag_is_balanced_exactly(ring_size: int, chunk: int) -> None:
    layout = SequenceLayout(2 * ring_size * chunk, ring_size)
    assert len(set(schedule(layout, None, Mask()).work)) == 1
    assert schedule(layout, None, Mask()).imbalance == 1.0


@given(st.integers(2, 8), st.integers(2, 6))
def test_contiguous_approaches_two_minus_one_over_n(ring_size: int, chunk: int) -> None:
    """The last rank sees nearly every key: ((2N-1)c + 1) / (Nc + 1) for chunks of c tokens."""
    layout = SequenceLayout(ring_size * chunk, ring_size, kind="contiguous")
    exact = ((2 * ring_size - 1) * chunk + 1) / (ring_size * chunk + 1)
    assert schedule(layout, None, Mask()).imbalance == pytest.approx(exact)
    long = SequenceLayout(ring_size * 4096, ring_size, kind="contiguous")
    assert schedule(long, None, Mask()).imbalance == pytest.approx(2 - 1 / ring_size, rel=1e-3)


@given(layouts(longest=400))
def test_zigzag_imbalance_is_padding_only(layout: SequenceLayout) -> None:
    """A rank has less work only by the queries that are padding, and what each would have seen."""
    work = Schedule(layout, Documents.single(layout.seq_len), Mask()).work
    if layout.kind == "zigzag":
        assert max(work) - min(work) <= (layout.padded_len - layout.seq_len) * layout.padded_len


def test_work_counts_equal_rows_as_often_as_they_are_given() -> None:
    layout, row, other = SequenceLayout(8, 2), np.array([[0, 8]]), np.array([[0, 4], [4, 8]])
    one = schedule(layout, Documents([row], 8), Mask()).work
    three = schedule(layout, Documents([row] * 3, 8), Mask()).work
    mixed = schedule(layout, Documents([row, other], 8), Mask()).work
    alone = schedule(layout, Documents([other], 8), Mask()).work
    assert three == tuple(3 * pairs for pairs in one)
    assert mixed == tuple(a + b for a, b in zip(one, alone, strict=True))
