"""The ring hides communication behind compute: shown by the order of events under delays."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.attention.distributed import Shards, attend_shards, mesh_of
from tests.helpers.attention.problems import HEADS, Grid, Problem
from tests.helpers.attention.transport import Event, Transport
from tests.helpers.pool import run_ranks

FULL = Problem((4, 2), "divides", causal=False, dtype=torch.bfloat16)


def call(
    problem: Problem, mesh: ContextParallelMesh, layout: SequenceLayout
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    """Forward and backward of one attention call, to be run separately."""
    q, k, v, dout = (mesh.shard(x, layout) for x in problem.tensors())
    for x in (q, k, v):
        x.requires_grad_()

    def forward() -> torch.Tensor:
        return context_parallel_attention(
            q, k, v, mesh=mesh, layout=layout, spec=problem.spec, kernel="reference"
        )

    return forward, lambda out: out.backward(dout)


def slow_transfers(event: Event) -> float:
    """A transfer that has to be waited for."""
    return 0.02 if event.what == "wait" else 0.0


def check_order(rank: int, world_size: int, ulysses: int, kind: str) -> None:
    ring = world_size // ulysses
    grid = Grid(ring, ulysses, kind)  # type: ignore[arg-type]
    with mesh_of(grid) as mesh:
        forward, backward = call(FULL, mesh, FULL.layout(grid))
        transport = Transport(mesh.ring_rank, ring, slow_transfers)
        with transport.watching():
            out = forward()
        assert len(transport.events) == 4 * ring - 2
        check_keys(transport, ring)
        with transport.watching():
            backward(out)
        assert len(transport.events) == 6 * ring - 4
        check_keys(transport, ring)
        check_gradients(transport, ring)


def check_keys(transport: Transport, ring: int) -> None:
    """The next hop's keys are under way before the kernel is called, and not waited for till after."""
    at = transport.at
    for hop in range(1, ring):
        assert at("post", hop, "keys") < at("kernel", hop - 1)
        assert at("kernel ends", hop - 1) < at("wait", hop, "keys") < at("kernel", hop)


def check_gradients(transport: Transport, ring: int) -> None:
    """A hop's gradients leave as soon as they are there, and travel during the next kernel call."""
    at = transport.at
    for hop in range(1, ring):
        assert at("kernel ends", hop) < at("post", hop, "gradients") < at("wait", hop, "gradients")
        if hop + 1 < ring:
            assert at("post", hop, "gradients") < at("kernel", hop + 1)
            assert at("kernel ends", hop + 1) < at("wait", hop, "gradients")


@pytest.mark.quick("4-1-*", "3-1-*", "2-1-*", "8-2-zigzag")
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("world_size", "ulysses"), [(2, 1), (3, 1), (4, 1), (8, 1), (8, 2)])
def test_next_hop_is_under_way_before_this_one_is_computed(
    world_size: int, ulysses: int, kind: str
) -> None:
    run_ranks(world_size, check_order, ulysses, kind)


HELD_UNTIL = {
    # Rank 2's first keys come from rank 1, and must not be waited for before the kernel's first call.
    (0, Event("post", "keys", 1)): (2, Event("kernel ends", "", 0)),
    (1, Event("post", "keys", 1)): (2, Event("kernel ends", "", 0)),
    # The gradients of hop 1 that rank 1 holds belong to rank 0, which goes on to hop 2 meanwhile.
    (1, Event("post", "gradients", 1)): (0, Event("kernel ends", "", 2)),
}
"""(0 forward or 1 backward, what rank 1 holds back) -> (rank, what that rank must do without it)."""


def hold_back(rank: int, world_size: int, folder: Path) -> int:
    """Rank 1 sends only after others have computed; how often it did."""
    held: list[Event] = []
    half = 0

    def flag(of: int, event: Event) -> Path:
        return folder / f"{half} {of} {event.what} {event.load} {event.hop}"

    def hold(event: Event) -> float:
        flag(rank, event).touch()
        if rank == 1 and (half, event) in HELD_UNTIL:
            wanted = flag(*HELD_UNTIL[half, event])
            deadline = time.monotonic() + 20.0
            while not wanted.exists():
                assert time.monotonic() < deadline, f"{wanted.name!r} waits for {event}"
                time.sleep(0.01)
            held.append(event)
        return 0.0

    grid = Grid(world_size)
    with mesh_of(grid) as mesh:
        forward, backward = call(FULL, mesh, FULL.layout(grid))
        transport = Transport(rank, world_size, hold)
        with transport.watching():
            out = forward()
        half = 1
        with transport.watching():
            backward(out)
    return len(held)


def test_ranks_compute_while_another_one_holds_back_what_it_sends(tmp_path: Path) -> None:
    assert run_ranks(3, hold_back, tmp_path) == [0, len(HELD_UNTIL), 0]


def attend_under(rank: int, world_size: int, problem: Problem, grid: Grid, how: str) -> Shards:
    """This rank's results under random delays, or with transfers that start when waited for."""
    random.seed(1000 + rank)

    def delay(event: Event) -> float:
        return random.uniform(0.0, 0.01) if how == "delays" else 0.0

    with mesh_of(grid) as mesh:
        transport = Transport(mesh.ring_rank, grid.ring, delay, postpone=how == "postponed")
        if how == "plain":
            return attend_shards(problem, grid, mesh, "reference")
        with transport.watching():
            return attend_shards(problem, grid, mesh, "reference")


@pytest.mark.quick("*-torch.float64-postponed", "*-torch.bfloat16-delays")
@pytest.mark.parametrize("how", ["delays", "postponed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "grid", [Grid(3), Grid(4), Grid(4, kind="contiguous"), Grid(2, 2), Grid(4, 2)], ids=str
)
def test_results_do_not_depend_on_when_data_moves(grid: Grid, dtype: torch.dtype, how: str) -> None:
    """Postponed transfers read the send buffers last: they must live, unchanged, until then."""
    problem = Problem(list(HEADS[grid.ulysses].values())[-1], "rows", dtype=dtype)
    plain = run_ranks(grid.world_size, attend_under, problem, grid, "plain")
    moved = run_ranks(grid.world_size, attend_under, problem, grid, how)
    for one, other in zip(plain, moved, strict=True):
        assert one.same_bits(other)


def posts(
    rank: int, world_size: int, lengths: list[int]
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(load, hop) of the transfers in forward and in backward; none of them is empty."""
    bounds = np.cumsum([0, *lengths])
    documents = Documents.from_cu_seqlens(bounds)
    layout = SequenceLayout(48, world_size, kind="contiguous", documents=documents)
    transport = Transport(rank, world_size)
    with mesh_of(Grid(world_size)) as mesh:
        forward, backward = call(replace(FULL, causal=True), mesh, layout)
        with transport.watching():
            out = forward()
        forward_posts = transport.posts
        with transport.watching():
            backward(out)
        return forward_posts, transport.posts


@pytest.mark.parametrize(
    ("lengths", "hops"),
    [
        ([12, 12, 12, 12], ([], [], [], [])),  # each rank has documents of its own
        ([24, 24], ([1], [1], [1], [1])),
        ([36, 12], ([1, 2], [1], [1, 2], [])),
        ([48], ([1, 2, 3], [1, 2], [1, 2], [1, 2, 3])),
    ],
    ids=str,
)
def test_hops_that_nobody_needs_send_nothing(
    lengths: list[int], hops: tuple[list[int], ...]
) -> None:
    """Contiguous shards of 12 tokens on 4 ranks; a hop is there if a document needs it."""
    for (forward, backward), active in zip(run_ranks(4, posts, lengths), hops, strict=True):
        keys = [("keys", hop) for hop in active]
        assert forward == keys
        assert sorted(backward) == sorted([*keys, *(("gradients", hop) for hop in active)])
