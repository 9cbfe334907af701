"""The calls of an all-gather against brute force over every pair of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given

from lightning_cp.layout import (
    Documents,
    GatheredSchedule,
    Mask,
    Schedule,
    SequenceLayout,
    gathered_schedule,
)
from lightning_cp.layout.exchange import EXECUTIONS, GatheredCall
from tests.helpers.layout.cases import Case, Ints, cases, ring_positions, rows_of, seen_in, visible

PACKED = Documents.from_cu_seqlens([0, 3, 17, 18, 40])
EXAMPLE = Case(SequenceLayout(40, ring_size=5), PACKED, Mask(uses_distance=True))


def of_ranks(case: Case) -> list[GatheredSchedule]:
    plan = case.plan
    return [gathered_schedule(plan, rank) for rank in range(case.layout.ring_size)]


def positions_of(call: GatheredCall) -> Ints:
    """Global position of each key of a call."""
    return np.concatenate([np.arange(start, end) for start, end in call.slices])


@pytest.mark.quick("fused")
@pytest.mark.parametrize("execution", EXECUTIONS)
@given(case=cases())
@example(case=EXAMPLE)
def test_calls_cover_each_visible_pair_once(execution: str, case: Case) -> None:
    length = case.layout.padded_len
    counts = np.zeros((case.documents.num_rows, length, length), dtype=np.int64)
    for rank, gathered in enumerate(of_ranks(case)):
        at = ring_positions(case.layout, rank)
        for call in gathered.calls(execution):
            keys_at = positions_of(call)
            for tile in call.tiles:
                queries = at[tile.q_start : tile.q_start + tile.q_len]
                keys = keys_at[tile.k_start : tile.k_start + tile.k_len]
                for row in rows_of(tile, case):
                    counts[row][np.ix_(queries, keys)] += seen_in(tile, case.mask)
    assert np.array_equal(counts, visible(case).astype(np.int64))


@given(cases())
def test_rank_order_laid_end_to_end_is_the_sequence(case: Case) -> None:
    ranks = range(case.layout.ring_size)
    held = np.concatenate([ring_positions(case.layout, rank) for rank in ranks])
    order = gathered_schedule(case.plan, 0).rank_order
    found = np.concatenate([held[start:end] for start, end in order])
    assert np.array_equal(found, np.arange(case.layout.padded_len))


@given(cases())
@example(EXAMPLE)
def test_a_slice_starts_and_ends_with_a_key_that_is_seen(case: Case) -> None:
    """So no call holds more keys than the chunk of queries needs."""
    for gathered in of_ranks(case):
        for call in gathered.two_kernel:
            ((start, end),) = call.slices
            first = min(tile.k_start for tile in call.tiles)
            last = max(tile.k_start + tile.k_len for tile in call.tiles)
            assert (first, last) == (0, end - start)


@given(cases())
@example(EXAMPLE)
def test_causal_tiles_end_on_their_diagonal(case: Case) -> None:
    """The last query sees the last key: what kernels that align at the bottom right compute."""
    for gathered in of_ranks(case):
        for call in (*gathered.two_kernel, *gathered.fused):
            for tile in call.tiles:
                assert tile.mask != "causal" or tile.delta == tile.k_len - tile.q_len >= 0


@given(cases())
def test_the_distance_holds_for_the_whole_tile_where_it_counts(case: Case) -> None:
    for rank, gathered in enumerate(of_ranks(case)):
        at = ring_positions(case.layout, rank)
        for call in gathered.fused:
            keys_at = positions_of(call)
            for tile in call.tiles:
                if case.mask.joins_segments and tile.mask == "full":
                    continue
                queries = at[tile.q_start : tile.q_start + tile.q_len]
                keys = keys_at[tile.k_start : tile.k_start + tile.k_len]
                assert queries[0] - keys[0] == tile.delta
                assert (np.diff(queries) == 1).all()
                assert (np.diff(keys) == 1).all()


def test_zigzag_is_two_calls_of_one_tile() -> None:
    """Rank 1 of 4 holds chunks 1 and 6 of 8: keys of chunks 0-1 for the one, 0-6 for the other."""
    plan = Schedule(SequenceLayout(80, ring_size=4), Documents.single(80), Mask())
    gathered = gathered_schedule(plan, 1)
    assert [call.slices for call in gathered.two_kernel] == [((0, 20),), ((0, 70),)]
    tiles = [tile for call in gathered.two_kernel for tile in call.tiles]
    assert [(t.q_start, t.q_len, t.k_len, t.delta, t.mask) for t in tiles] == [
        (0, 10, 20, 10, "causal"),
        (10, 10, 70, 60, "causal"),
    ]
    (fused,) = gathered.fused
    assert fused.slices == ((0, 20), (0, 70))
    assert [tile.k_start for tile in fused.tiles] == [0, 20]


def test_contiguous_needs_no_reordering() -> None:
    plan = Schedule(SequenceLayout(40, 4, kind="contiguous"), Documents.single(40), Mask())
    gathered = gathered_schedule(plan, 2)
    assert gathered.rank_order == ((0, 40),)
    assert gathered.fused == gathered.two_kernel
    assert [call.slices for call in gathered.fused] == [((0, 30),)]


def test_a_rank_of_padding_has_no_calls() -> None:
    documents = Documents([np.array([[0, 5]])], 40)
    plan = Schedule(SequenceLayout(40, 4, kind="contiguous"), documents, Mask())
    assert gathered_schedule(plan, 3).two_kernel == ()
    assert gathered_schedule(plan, 3).fused == ()
