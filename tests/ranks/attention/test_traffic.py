"""What each rank sends in forward and backward: exactly what the schedule says, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.attention.keys import Keys
from lightning_cp.kernels.protocol import accumulate_dtype
from lightning_cp.layout import HeadSplit, Traffic, attention_traffic, schedule
from lightning_cp.layout.tiles import Ranges
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.attention.distributed import mesh_of
from tests.helpers.attention.problems import (
    BATCH,
    GRIDS,
    HEADS,
    NARROW,
    RING,
    SEQUENCES,
    Grid,
    Problem,
    gather,
    rarely,
)
from tests.helpers.attention.wire import ALL_GATHER, REDUCE_SCATTER, Wire
from tests.helpers.pool import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
DATA = {"alltoall_base_", "send", "recv_"}
KINDS = {
    "ulysses": {"alltoall_base_"},
    "ring": {"send", "recv_"},
    "hybrid": DATA,
    "all_gather": {ALL_GATHER},
    "all_gather over ulysses": {ALL_GATHER, "alltoall_base_"},
}


class Counted(NamedTuple):
    """What one rank did in the forward, or in the backward, of one problem."""

    traffic: Traffic
    counts: dict[str, int]
    received: int


def record(
    rank: int, world_size: int, problems: list[Problem], grid: Grid
) -> list[tuple[Counted, Counted]]:
    """Forward and backward of each problem."""
    with mesh_of(grid) as mesh:
        return [record_one(problem, grid, mesh) for problem in problems]


def record_one(problem: Problem, grid: Grid, mesh: ContextParallelMesh) -> tuple[Counted, Counted]:
    layout = problem.layout(grid)
    q, k, v, dout = (mesh.shard(x, layout) for x in problem.tensors())
    for x in (q, k, v):
        x.requires_grad_()
    with Wire(mesh.ulysses_rank) as forward:
        out = context_parallel_attention(
            *(q, k, v),
            mesh=mesh,
            layout=layout,
            spec=problem.spec,
            kernel="reference",
            **grid.how,
        )
    with Wire(mesh.ulysses_rank) as backward:
        out.backward(dout)
    return tuple(Counted(w.traffic, w.counts, w.received) for w in (forward, backward))  # type: ignore[return-value]


def planned(problem: Problem, grid: Grid, rank: int) -> tuple[Traffic, Traffic]:
    """What the schedule says that a rank sends in (forward, backward)."""
    return attention_traffic(
        schedule(problem.layout(grid), None, problem.spec.mask),
        HeadSplit(*problem.heads, grid.ulysses),
        rank,
        batch=BATCH,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        itemsize=problem.dtype.itemsize,
        accumulate_itemsize=accumulate_dtype(problem.dtype).itemsize,
        exchange=grid.exchange.name,
        kv_heads_per_gather=grid.exchange.kv_heads_per_gather,
        key_gradients=grid.exchange.key_gradients,
    )


def problems_of(grid: Grid) -> list[Problem]:
    """Every kind of sequence and mask; every split of heads and dtype."""
    heads = HEADS[grid.ulysses]
    found = [Problem(heads["gqa"], *part) for part in product(SEQUENCES, (True, False))]
    found += [Problem(pair, "rows", dtype=dtype) for pair, dtype in product(heads.values(), DTYPES)]
    windows = [("dense", True, (6, -1)), ("long", True, (9, -1)), ("rows", False, (5, 9))]
    found += [Problem(heads["gqa"], *part) for part in windows]
    return [
        *found,
        *(Problem(pair, "rows", value_dim=dim) for pair in heads.values() for dim in (3, 11)),
    ]


@pytest.mark.quick("ulysses 2", "ring 2 zigzag")
@pytest.mark.parametrize("grid", rarely(*GRIDS))
def test_sends_what_the_schedule_says(grid: Grid) -> None:
    problems = problems_of(grid)
    ranks = run_ranks(grid.world_size, record, problems, grid)
    for index, problem in enumerate(problems):
        found = [of_rank[index] for of_rank in ranks]
        for rank, halves in enumerate(found):
            sent = tuple(half.traffic for half in halves)
            assert sent == planned(problem, grid, rank), (str(problem), rank)
        for half in range(2):  # what is sent arrives
            sent = sum(halves[half].traffic.total_bytes for halves in found)
            assert sent == sum(halves[half].received for halves in found)
            assert sent > 0


@pytest.mark.parametrize("grid", [Grid(4, exchange=NARROW), Grid(2, 2, exchange=NARROW)], ids=str)
def test_gradients_of_keys_travel_in_the_compute_dtype(grid: Grid) -> None:
    problem = Problem(HEADS[grid.ulysses]["gqa"], dtype=torch.bfloat16)
    wide = replace(grid, exchange=RING)
    for rank, (_, backward) in enumerate(
        found[0] for found in run_ranks(grid.world_size, record, [problem], grid)
    ):
        assert backward.traffic == planned(problem, grid, rank)[1]
        assert backward.traffic.p2p_bytes < planned(problem, wide, rank)[1].p2p_bytes


@pytest.mark.quick(
    "ring 4*",
    "ring 3*",
    "ulysses*",
    "hybrid 2x2*",
    "hybrid 3x2*",
    "gather 2x2*",
    "gather 3*",
    "gather 4 *",
    "ring 8 zigzag",
)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_nothing_but_exchanges_and_one_agreement(grid: Grid) -> None:
    kinds = KINDS[grid.mode]
    home = {REDUCE_SCATTER} if grid.exchange.name == "all_gather" else set()
    problem = Problem(HEADS[grid.ulysses]["gqa"], causal=False)
    for found in run_ranks(grid.world_size, record, [problem], grid):
        forward, backward = found[0]
        assert set(backward.counts) == kinds | home
        assert set(forward.counts) == kinds | {"allreduce_"}
        assert forward.counts["allreduce_"] == 1


@pytest.mark.parametrize("sequences", SEQUENCES)
def test_one_rank_calls_nothing(sequences: str) -> None:
    (found,) = run_ranks(1, record, [Problem(sequences=sequences)], Grid())
    assert [half.counts for half in found[0]] == [{}, {}]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_full_ring_sends_its_keys_to_every_other_rank(ranks: int) -> None:
    """Forward 2 K (N - 1), K the bytes of the local keys; backward their gradients too."""
    problem = Problem((4, 2), "divides", causal=False, dtype=torch.bfloat16)
    keys = BATCH * (48 // ranks) * 2 * problem.head_dim * 2
    for found in run_ranks(ranks, record, [problem], Grid(ranks)):
        forward, backward = (half.traffic for half in found[0])
        assert forward == Traffic(0, 0, ranks - 1, 2 * keys * (ranks - 1))
        gradients = 2 * keys  # float32: twice as wide
        total = 2 * (keys + gradients) * (ranks - 1)
        assert backward == Traffic(0, 0, 2 * (ranks - 1), total)


def count_packs(rank: int, world_size: int, causal: bool) -> int:
    """Copies of keys into messages in a forward and a backward."""
    made: list[Ranges] = []
    message = Keys.message
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "message", lambda self, x: made.append(x) or message(self, x))
        record(rank, world_size, [Problem((4, 2), "divides", causal=causal)], Grid(world_size))
    return len(made)


def test_equal_ranges_of_keys_are_packed_once_in_each_pass() -> None:
    """Later ranks need the first half of the causal keys, and earlier ones both: two kinds of message."""
    assert run_ranks(4, count_packs, False) == [2] * 4
    assert run_ranks(4, count_packs, True) == [2, 4, 4, 2]


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 8), (4, 8), (8, 8), (8, 2), (4, 1)])
def test_ulysses_sends_all_but_its_own_share(ranks: int, kv_heads: int) -> None:
    """(N - 1) / N (2 A + 2 K r), A and K the bytes of the local queries and keys, r the copies."""
    problem = Problem((8, kv_heads), "divides", dtype=torch.bfloat16)
    of_head = BATCH * (48 // ranks) * problem.head_dim * 2
    copies = max(1, ranks // kv_heads)
    queries, keys = 8 * of_head, kv_heads * of_head
    wide = 2 if copies > 1 else 1  # shared heads' gradients are summed, so they travel as float32
    for found in run_ranks(ranks, record, [problem], Grid(1, ranks)):
        forward, backward = (half.traffic for half in found[0])
        assert forward.all_to_all_bytes * ranks == (ranks - 1) * 2 * (queries + keys * copies)
        assert backward.all_to_all_bytes * ranks == (ranks - 1) * 2 * (
            queries + keys * copies * wide
        )
        assert forward.all_to_all_calls == 2  # q with k and v, out
        assert backward.all_to_all_calls == (3 if copies > 1 else 2)  # dout, dq with dkv if it may
        assert forward.p2p_messages == backward.p2p_messages == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("stride", [1, 3, None])
def test_a_gather_sends_its_keys_to_every_other_rank_once(ranks: int, stride: int | None) -> None:
    """Forward 2 K (N - 1) in as many calls as strides; in backward again, and as many gradients, wide."""
    exchange = gather("two_kernel", "fused", stride)
    problem = Problem((8, 4), "divides", dtype=torch.bfloat16)
    keys = BATCH * (48 // ranks) * 4 * problem.head_dim * 2
    calls = {1: 4, 3: 2, None: 1}[stride]
    for found in run_ranks(ranks, record, [problem], Grid(ranks, exchange=exchange)):
        forward, backward = (half.traffic for half in found[0])
        sent = 2 * keys * (ranks - 1)
        assert forward == Traffic(all_gather_calls=calls, all_gather_bytes=sent)
        home = Traffic(reduce_scatter_calls=calls, reduce_scatter_bytes=2 * sent)
        assert backward == forward + home


def test_every_mode_is_counted_on_two_four_and_eight_ranks() -> None:
    counted = {(grid.mode, grid.world_size) for grid in GRIDS}
    assert counted >= {(mode, n) for mode in ("ulysses", "ring", "all_gather") for n in (2, 4, 8)}
    hybrids = ("hybrid", "all_gather over ulysses")
    assert counted >= {(mode, n) for mode in hybrids for n in (4, 8)}
    dealt = {(grid.world_size, grid.ulysses > 1) for grid in GRIDS if grid.kind == "balanced"}
    assert dealt >= {(2, False), (4, False), (4, True), (8, False)}
