"""The schedule's tiles against brute force over every pair of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import ALL_ROWS, Documents, Mask, Schedule, SequenceLayout, Tile, schedule
from tests.helpers.layout.cases import (
    Case,
    cases,
    computed,
    layouts,
    ring_positions,
    rows_of,
    seen_in,
    tiles_of,
    visible,
)

FULL_RING = SequenceLayout(40, ring_size=5)
# The last tile of row 0 and the first of row 1 touch in keys at rank 1, hop 1.
TWO_ROWS = Documents([np.array([[2, 8]]), np.array([[4, 24]])], 24)
PACKED = Documents.from_cu_seqlens([0, 3, 17, 18, 40])


@given(cases())
@example(Case(FULL_RING, PACKED, Mask(uses_distance=True)))
@example(Case(FULL_RING, PACKED, Mask(causal=False, window=(7, 3))))
@example(Case(SequenceLayout(37, 3, 2), Documents.single(37), Mask(window=(5, -1))))
@example(Case(SequenceLayout(24, 3), TWO_ROWS, Mask(causal=False)))
@example(Case(SequenceLayout(3, 1), Documents.single(3), Mask(causal=False, window=(2, 1))))
def test_tiles_cover_each_visible_pair_once(case: Case) -> None:
    counts = computed(case, case.plan)
    assert np.array_equal(counts, visible(case).astype(np.int64))


@given(cases())
def test_no_tile_is_empty_or_wider_than_needed(case: Case) -> None:
    """Every query of a tile sees a key of it, and every key is seen: nothing travels in vain."""
    for _, _, tile in tiles_of(case, case.plan):
        assert tile.q_len > 0
        assert tile.k_len > 0
        seen = seen_in(tile, case.mask)
        assert seen.any(axis=1).all()
        assert seen.any(axis=0).all()


@given(cases())
def test_the_mask_is_named_as_simply_as_possible(case: Case) -> None:
    """Full iff every pair is visible; causal iff only causality hides pairs.

    A single token on the diagonal is called causal too, so that it can join a longer diagonal.
    """
    for q_rank, k_rank, tile in tiles_of(case, case.plan):
        seen = seen_in(tile, case.mask)
        corner = case.mask.right == 0 and (tile.delta, tile.q_len, tile.k_len) == (0, 1, 1)
        assert (tile.mask == "full") == (bool(seen.all()) and not corner)
        if tile.mask == "causal":
            assert case.mask.right == 0
            assert q_rank == k_rank or case.mask.window != (-1, -1)


@given(cases())
def test_causal_tiles_without_a_window_are_square(case: Case) -> None:
    """Kernels with a causal flag only know the diagonal that begins in the corner."""
    for _, _, tile in tiles_of(case, case.plan):
        if tile.mask == "causal" and case.mask.window[0] < 0:
            assert tile.delta == 0
            assert tile.q_len == tile.k_len
        assert tile.mask != "band" or case.mask.window != (-1, -1)


@given(cases())
def test_delta_holds_for_a_whole_tile_where_distance_matters(case: Case) -> None:
    """Without joining, local distances plus delta are global distances, for every pair."""
    if case.mask.joins_segments:
        return
    at = [ring_positions(case.layout, rank) for rank in range(case.layout.ring_size)]
    for q_rank, k_rank, tile in tiles_of(case, case.plan):
        queries = at[q_rank][tile.q_start : tile.q_start + tile.q_len]
        keys = at[k_rank][tile.k_start : tile.k_start + tile.k_len]
        assert (np.diff(queries) == 1).all()
        assert (np.diff(keys) == 1).all()
        assert tile.delta == queries[0] - keys[0]


@given(cases())
def test_joined_tiles_keep_the_delta_of_their_corner(case: Case) -> None:
    at = [ring_positions(case.layout, rank) for rank in range(case.layout.ring_size)]
    for q_rank, k_rank, tile in tiles_of(case, case.plan):
        assert tile.delta == at[q_rank][tile.q_start] - at[k_rank][tile.k_start]


@given(cases())
def test_nothing_is_left_to_join(case: Case) -> None:
    """No two full tiles of a hop make one larger rectangle that would be allowed."""
    plan = case.plan
    for rank in range(case.layout.ring_size):
        for hop in plan.rank(rank).hops:
            full = [tile for tile in hop.tiles if tile.mask == "full"]
            assert not any(joinable(a, b, case.mask) for a in full for b in full)


def joinable(a: Tile, b: Tile, mask: Mask) -> bool:
    """Whether ``b`` follows ``a`` in keys or in queries, also globally if distance matters."""
    if a.row != b.row:
        return False
    beside = (a.q_start, a.q_len, a.k_start + a.k_len) == (b.q_start, b.q_len, b.k_start)
    below = (a.k_start, a.k_len, a.q_start + a.q_len) == (b.k_start, b.k_len, b.q_start)
    step = a.q_len if below else -a.k_len
    return (beside or below) and (mask.joins_segments or b.delta == a.delta + step)


@given(cases())
def test_equal_rows_share_their_tiles(case: Case) -> None:
    rows = {tile.row for _, _, tile in tiles_of(case, case.plan)}
    if case.documents.shared:
        assert rows <= {ALL_ROWS}
    else:
        assert rows <= set(range(case.documents.num_rows))


@given(cases())
def test_tiles_come_in_order(case: Case) -> None:
    plan = case.plan
    for rank in range(case.layout.ring_size):
        for hop in plan.rank(rank).hops:
            order = [(tile.row, tile.q_start, tile.k_start) for tile in hop.tiles]
            assert order == sorted(order)


@given(cases(), st.integers(0, 12))
def test_causal_is_a_window_that_ends_at_the_query(case: Case, left: int) -> None:
    causal = Schedule(case.layout, case.documents, Mask(True, (left, 5)))
    window = Schedule(case.layout, case.documents, Mask(False, (left, 0)))
    assert list(tiles_of(case, causal)) == list(tiles_of(case, window))


@given(layouts(kinds=("contiguous", "zigzag")), st.booleans())
def test_one_document_costs_one_call_per_hop(layout: SequenceLayout, causal: bool) -> None:
    """Zigzag: half the keys, or half the queries, in one rectangle; exactly one without padding."""
    plan = Schedule(layout, Documents.single(layout.seq_len), Mask(causal))
    unpadded = layout.padded_len == layout.seq_len
    for rank in range(layout.ring_size):
        for hop in plan.rank(rank).hops:
            assert len(hop.tiles) <= 1
            if unpadded and (layout.kind == "zigzag" or not causal):
                assert len(hop.tiles) == 1


def test_zigzag_tiles_of_four_ranks() -> None:
    plan = schedule(SequenceLayout(64, ring_size=4), None, Mask())
    local, *hops = plan.rank(1).hops
    assert local.tiles == ((ALL_ROWS, 0, 16, 0, 16, 0, "causal"),)
    assert [hop.source for hop in hops] == [0, 3, 2]
    assert [hop.tiles for hop in hops] == [
        ((ALL_ROWS, 0, 16, 0, 8, 8, "full"),),  # all queries, the early half of the keys
        ((ALL_ROWS, 8, 8, 0, 16, 24, "full"),),  # the late half of the queries, all keys
        ((ALL_ROWS, 8, 8, 0, 16, 32, "full"),),
    ]


def test_distance_keeps_segments_apart() -> None:
    plan = schedule(SequenceLayout(64, ring_size=4), None, Mask(uses_distance=True))
    assert [tile.mask for tile in plan.rank(1).hops[0].tiles] == ["causal", "full", "causal"]
    # The two chunks of rank 3 are neighbours, so its keys are one segment.
    assert [len(hop.tiles) for hop in plan.rank(1).hops[1:]] == [2, 1, 2]


def test_padding_and_empty_documents_have_no_tiles() -> None:
    layout = SequenceLayout(16, ring_size=2)
    plan = schedule(layout, Documents([np.zeros((0, 2), dtype=np.int64)], 16), Mask())
    assert plan.work == (0, 0)
    assert plan.imbalance == 1.0
    assert all(hop.idle and not hop.tiles for rank in (0, 1) for hop in plan.rank(rank).hops)


def test_the_schedule_is_cached() -> None:
    def ask(causal: bool = True) -> Schedule:
        documents = Documents.from_cu_seqlens([0, 700, 2048])
        return schedule(SequenceLayout(2048, 4), documents, Mask(causal))

    assert ask() is ask()
    assert ask().rank(2) is ask().rank(2)
    assert ask().rank(2).hops[1].packed_tiles is ask().rank(2).hops[1].packed_tiles
    assert ask() is not ask(causal=False)


def test_the_layouts_documents_are_the_default() -> None:
    documents = Documents.from_cu_seqlens([0, 7, 32])
    layout = SequenceLayout(32, 2, documents=documents)
    assert schedule(layout, None, Mask()).documents == documents
    single = Documents.single(32)
    assert schedule(layout, single, Mask()).documents == single
    assert schedule(SequenceLayout(32, 2), None, Mask()).documents == single


def test_a_schedule_refuses_documents_of_another_length() -> None:
    with pytest.raises(ShapeError, match="describe 12 tokens, but the layout has 16"):
        schedule(SequenceLayout(16, 2), Documents.single(12), Mask())


@pytest.mark.parametrize("window", [(-2, 0), (0, -5), (1,), (1, 2, 3)])
def test_a_mask_refuses(window: Any) -> None:
    with pytest.raises(ConfigError, match=r"window must be \(left, right\) .* got \("):
        Mask(window=window)


def test_a_window_may_come_as_a_list() -> None:
    unbounded: Any = [-1, -1]
    assert Mask(window=unbounded) == Mask()
    assert Mask(window=unbounded).joins_segments
    assert schedule(SequenceLayout(16, 2), None, Mask(window=unbounded)).mask == Mask()


@pytest.mark.parametrize(
    ("mask", "joins"),
    [
        (Mask(), True),
        (Mask(causal=False), True),
        (Mask(uses_distance=True), False),
        (Mask(window=(5, -1)), False),
    ],
)
def test_joining_needs_scores_without_distance(mask: Mask, joins: bool) -> None:
    assert mask.joins_segments == joins


def test_rows_of_a_shared_tile() -> None:
    """The brute force itself: a tile for all rows counts in each of them."""
    case = Case(SequenceLayout(8, 2), Documents([np.array([[0, 8]])] * 3, 8), Mask())
    _, _, tile = next(tiles_of(case, case.plan))
    assert rows_of(tile, case) == [0, 1, 2]
