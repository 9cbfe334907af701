"""Results do not depend on when data arrives: no buffer is read before its wait, or used again before it.

See ``tests.helpers.attention.late_delivery``: what is received is NaN until it was waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_cp.comm.all_gather import start_all_gather, start_reduce_scatter
from lightning_cp.comm.transfer import post_all_to_all, post_broadcast, start_transfer
from lightning_cp.optim import Muon
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.attention.distributed import attend_shards, mesh_of
from tests.helpers.attention.late_delivery import (
    GATHERS,
    SCATTERS,
    LateDelivery,
    LateDeliveryError,
    nccl_branches,
)
from tests.helpers.attention.problems import EVERY, GRIDS, HEADS, Grid, Problem, gather, rarely
from tests.helpers.pool import run_ranks


def problems(grid: Grid) -> list[Problem]:
    """Every kind of sequence and mask, and heads that straddle groups where Ulysses splits any."""
    pairs = HEADS[grid.ulysses]
    last = list(pairs.values())[-1]
    return [
        Problem(pairs["gqa"], "dense"),
        Problem(last, "packed", causal=False),
        Problem(last, "rows", dtype=torch.bfloat16),
        Problem(pairs["mha"], "long", window=(9, -1)),
        Problem(pairs["mqa"], "short", value_dim=16, **EVERY),
    ]


def attend_late(rank: int, world_size: int, grid: Grid, *, as_nccl: bool = False) -> Counter[str]:
    """Compare each problem's results with those of data that came in time; count what was posted."""
    late = LateDelivery()
    with mesh_of(grid) as mesh, nccl_branches() if as_nccl else nullcontext():
        for problem in problems(grid):
            with late.delaying():  # first: without a wait gloo itself may hang
                moved = attend_shards(problem, grid, mesh, "reference")
            plain = attend_shards(problem, grid, mesh, "reference")
            assert plain.same_bits(moved), str(problem)
    return late.posts


def posts_of(grid: Grid) -> set[str]:
    """Functions of torch.distributed that attention on a grid posts messages by; each must be delayed."""
    found = {"all_to_all_single"} if grid.ulysses > 1 else set[str]()
    if grid.ring > 1 and grid.exchange.name in ("ring", "rotation"):
        found.add("batch_isend_irecv")
    elif grid.ring > 1:
        newest = next(name for name in reversed(GATHERS) if hasattr(dist, name))
        found |= {newest, "all_to_all_single"}  # the latter is gloo's reduce-scatter
    return found


@pytest.mark.parametrize("grid", rarely(*GRIDS))
def test_attention_reads_what_has_arrived_and_sends_what_stays(grid: Grid) -> None:
    for posts in run_ranks(grid.world_size, attend_late, grid, timeout=120):
        assert set(posts) == posts_of(grid)


def test_a_reduce_scatter_of_nccl_is_waited_for_too() -> None:
    grid = Grid(2, exchange=gather("two_kernel", "fused"))
    for posts in run_ranks(2, attend_late, grid, as_nccl=True):
        assert set(posts) & set(SCATTERS), posts


def step_late(rank: int, world_size: int, copies: int) -> Counter[str]:
    """Two steps of Muon, whose messages come in time and late."""

    def weights(late: LateDelivery | None) -> list[torch.Tensor]:
        forget_meshes()
        mesh = init_device_mesh("cpu", (copies, world_size // copies))
        torch.manual_seed(0)
        named: list[tuple[str, torch.Tensor]] = []
        for at in range(6):
            x = distribute_tensor(
                torch.randn(16, 12), mesh, [Replicate(), Shard(0)], src_data_rank=None
            )
            named.append((f"w{at}", nn.Parameter(x)))
            named[-1][1].grad = x.clone()
        muon = Muon(named, ns_dtype="float32", chunk_mib=2 * 16 * 12 * 4 / 2**20)
        for _ in range(2):
            with nullcontext() if late is None else late.delaying():
                muon.step()
        return [x.detach().to_local() for _, x in named]  # type: ignore[attr-defined]

    late = LateDelivery()
    for plain, moved in zip(weights(None), weights(late), strict=True):
        assert torch.equal(plain, moved)
    return late.posts


@pytest.mark.parametrize("copies", [1, 2])
def test_muon_reads_what_has_arrived_and_sends_what_stays(copies: int) -> None:
    wanted = {"all_to_all_single", *(["broadcast"] if copies > 1 else [])}
    for posts in run_ranks(4, step_late, copies):
        assert set(posts) == wanted


# The harness itself: an early read, an early write and a message without a wait show, for each function.


def group() -> dist.ProcessGroup:
    """The group of both ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def transfer(send: torch.Tensor, rank: int) -> Any:
    return start_transfer(send, 1 - rank, send.shape, 1 - rank, send, group())


def gathered(send: torch.Tensor, rank: int) -> Any:
    return start_all_gather(send, group())


def scattered(send: torch.Tensor, rank: int) -> Any:
    with nccl_branches():
        return start_reduce_scatter(send, group())


def exchanged(send: torch.Tensor, rank: int) -> Any:
    return post_all_to_all(send, [2, 2], [2, 2], group())


def broadcast(send: torch.Tensor, rank: int) -> Any:
    return post_broadcast(send, 1, group())


POSTS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "transfer": transfer,
    "all_gather": gathered,
    "reduce_scatter": scattered,
    "all_to_all": exchanged,
    "broadcast": broadcast,
}


def read_early(rank: int, world_size: int, name: str) -> None:
    """What has not been waited for holds no number (but for a part that a rank itself put there)."""
    late = LateDelivery()
    with late.delaying():
        message = POSTS[name](torch.arange(4.0) + rank, rank)
        early = getattr(message, "received" if name == "transfer" else "_received").clone()
        came = message.wait()
    own = {"all_gather": 4, "broadcast": 4 * (rank == 1)}.get(name, 0)
    assert int(early.isnan().sum()) == early.numel() - own
    assert not came.isnan().any()


@pytest.mark.parametrize("name", POSTS)
def test_a_buffer_holds_nothing_until_it_was_waited_for(name: str) -> None:
    run_ranks(2, read_early, name)


def write_early(rank: int, world_size: int, name: str) -> None:
    """A send buffer that its owner writes to shows at the wait; on its sender, in a broadcast."""
    send = torch.arange(4.0)
    late = LateDelivery()
    with late.delaying():
        message = POSTS[name](send, rank)
        sent = getattr(message, "_sent", None)
        (send if sent is None or name == "transfer" else sent)[0] = 7.0
        sends = name != "broadcast" or rank == 1
        with pytest.raises(LateDeliveryError, match="changed") if sends else nullcontext():
            message.wait()


@pytest.mark.parametrize("name", POSTS)
def test_a_send_buffer_that_changes_early_shows(name: str) -> None:
    run_ranks(2, write_early, name)


def leave(rank: int, world_size: int, name: str) -> None:
    late = LateDelivery()
    with pytest.raises(LateDeliveryError, match="never waited for"), late.delaying():
        POSTS[name](torch.arange(4.0), rank)
    dist.barrier()


@pytest.mark.parametrize("name", POSTS)
def test_a_message_without_a_wait_shows(name: str) -> None:
    run_ranks(2, leave, name)
