"""A window much shorter than a shard: only the last few keys of the rank before travel, once."""

from __future__ import annotations

import pytest

from lightning_cp.layout import choose_layout, schedule
from lightning_cp.layout.tiles import num_keys
from tests.helpers.attention.problems import BATCH, Grid, Problem
from tests.helpers.pool import run_ranks
from tests.ranks.attention.test_traffic import record

RANKS, LENGTH = 4, 48
GRID = Grid(RANKS, kind="contiguous")


@pytest.mark.parametrize("back", [1, 6, 11])
def test_one_message_to_the_next_rank(back: int) -> None:
    """Forward: the window's keys. Backward: they again, and their gradients home."""
    problem = Problem((4, 2), "divides", window=(back, -1))
    layout = problem.layout(GRID)
    chosen = choose_layout(LENGTH, RANKS, mask=problem.spec.mask)
    assert (chosen.kind, chosen.checksum) == ("contiguous", layout.checksum)
    token = BATCH * 2 * 2 * problem.head_dim * 8  # K and V of two heads in float64
    for rank, found in enumerate(run_ranks(RANKS, record, [problem], GRID)):
        forward, backward = (half.traffic for half in found[0])
        sends, returns = int(rank < RANKS - 1), int(rank > 0)
        assert (forward.p2p_messages, forward.p2p_bytes) == (sends, sends * back * token)
        assert backward.p2p_messages == sends + returns
        assert backward.p2p_bytes == (sends + returns) * back * token


@pytest.mark.parametrize(("back", "hops"), [(11, 1), (12, 1), (13, 2), (24, 2), (25, 3)])
def test_hops_outside_the_window_neither_compute_nor_communicate(back: int, hops: int) -> None:
    """Shards of 12 tokens: a query sees its own shard and up to ``back`` keys of those before."""
    problem = Problem((4, 2), "divides", window=(back, -1))
    plan = schedule(problem.layout(GRID), None, problem.spec.mask)
    for rank in range(RANKS):
        for hop in plan.rank(rank).hops[1:]:
            comes, goes = hop.index <= min(hops, rank), hop.index <= min(hops, RANKS - 1 - rank)
            assert bool(hop.tiles) == bool(hop.recv) == comes
            assert bool(hop.send) == goes
            keys = max(0, min(12, back - 12 * (hop.index - 1)))
            assert num_keys(hop.recv) == keys * comes
