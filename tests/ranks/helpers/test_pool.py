"""The pool of ranks: results, what is kept between cases and what is not."""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_cp.watchdog.watch import SWITCH
from tests.helpers.pool import master, rank_pids, run_ranks


def total(rank: int, world_size: int, scale: float, *, plus: float = 0.0) -> float:
    ranks = torch.tensor(float(rank))
    dist.all_reduce(ranks)
    return scale * ranks.item() + plus + world_size * 0


def echo(rank: int, world_size: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + rank


def same_group(rank: int, world_size: int) -> tuple[int, int, int]:
    return os.getpid(), id(dist.group.WORLD), len(dist.distributed_c10d._world.pg_map)


def test_results_come_in_rank_order_for_every_size() -> None:
    for world_size in (4, 2, 1, 3, 4, 8, 8):
        assert (
            run_ranks(world_size, total, 2.0, plus=1.0)
            == [world_size * (world_size - 1.0) + 1.0] * world_size
        )


def test_tensors_travel_both_ways() -> None:
    given = torch.arange(6, dtype=torch.float64).view(2, 3)
    for rank, got in enumerate(run_ranks(2, echo, given)):
        torch.testing.assert_close(got, given + rank, rtol=0, atol=0)


def test_processes_and_group_are_kept_between_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master, "CASES", sys.maxsize)
    assert run_ranks(3, same_group) == run_ranks(3, same_group)
    assert {pid for pid, _, _ in run_ranks(2, same_group)} <= set(rank_pids())


def test_new_ranks_take_over_after_a_number_of_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    ((before, _, _),) = run_ranks(1, same_group)
    monkeypatch.setattr(master, "CASES", 0)
    ((after, _, _),) = run_ranks(1, same_group)
    assert before != after


def test_world_size_beyond_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 8 ranks, got world_size=9"):
        run_ranks(9, same_group)


def switch(rank: int, world_size: int) -> str | None:
    return os.environ.get(SWITCH)


def test_only_its_ranks_have_the_watch_switched_off() -> None:
    """Programs that other tests start inherit the environment of this process."""
    assert run_ranks(2, switch) == ["0", "0"]
    assert SWITCH not in os.environ


def leave_a_mess(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.all_reduce(torch.ones(1), group=mesh["b"].get_group())
    os.environ["POOL_MESS"] = "1"
    os.environ.pop("PATH", None)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.manual_seed(1234 + rank)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("left").write_text("behind")


def inspect(rank: int, world_size: int) -> dict[str, Any]:
    dist.all_reduce(torch.ones(1))
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "environment": ("POOL_MESS" in os.environ, "PATH" in os.environ),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random": (torch.rand(()).item(), random.random(), float(np.random.rand())),
        "grad": torch.is_grad_enabled(),
        "filters": [action for action, *_ in warnings.filters],
        "sigterm": signal.getsignal(signal.SIGTERM),
        "files": list(Path().iterdir()),
    }


def test_a_case_sees_nothing_of_the_one_before() -> None:
    before = run_ranks(4, inspect)
    run_ranks(4, leave_a_mess)
    assert run_ranks(4, inspect) == before
    first = before[0]
    assert first["groups"] == 1
    assert first["environment"] == (False, True)
    assert first["threads"] == 1
    assert first["filters"] == [action for action, *_ in warnings.filters]
    assert first["files"] == []


def group_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)


def destroy(rank: int, world_size: int) -> None:
    dist.destroy_process_group()


def make_mesh(rank: int, world_size: int) -> float:
    mesh = init_device_mesh("cpu", (world_size,))
    ones = torch.ones(1)
    dist.all_reduce(ones, group=mesh.get_group())
    return ones.item()


@pytest.mark.parametrize("case", [group_on_rank_0, destroy])
def test_a_group_that_a_case_spoiled_is_replaced(case: Any) -> None:
    run_ranks(2, case)
    assert run_ranks(2, make_mesh) == [2.0, 2.0]


def listening(rank: int, world_size: int) -> list[str]:
    """Addresses on which this process accepts TCP connections, from the kernel's tables."""
    dist.all_reduce(torch.ones(1))
    links = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    ours = {link.rsplit("[", 1)[1].rstrip("]") for link in links if "socket:[" in link}
    return [address for address, inode in _listeners() if inode in ours]


def _listeners() -> Iterator[tuple[str, str]]:
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                yield fields[1].split(":")[0], fields[9]


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's socket tables")
def test_ranks_listen_on_the_loopback_only() -> None:
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    found = run_ranks(2, listening)
    assert all(addresses for addresses in found), "gloo listens, so finding nothing proves nothing"
    assert {address for addresses in found for address in addresses} <= loopback
