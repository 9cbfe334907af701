"""The group that axes of size 1 share on GPUs: what one rank would receive, and training over such axes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_cp.comm import groups
from lightning_cp.comm.all_gather import start_all_gather, start_reduce_scatter
from lightning_cp.comm.reduce import all_max, all_mean, all_sum, broadcast_tensors
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.engine_runs import Cell, Outcome, execute
from tests.helpers.versions import FAKE_RECEIVES


def as_on_gpus() -> Any:
    """Within it, meshes are made as in a world of NCCL's, but for the backend of a real group of one rank."""

    def alone(ranks: torch.Tensor) -> dist.ProcessGroup:
        return groups._fake_group() or groups.group_of(ranks.reshape(-1, 1))

    return mock.patch.object(groups, "_group_of_one", side_effect=alone)


def collectives(rank: int, world_size: int) -> None:
    with as_on_gpus():
        mesh = ContextParallelMesh(ring_size=world_size)
    group, x = mesh.group("tp"), torch.arange(6.0).view(2, 3) + rank
    assert (dist.get_backend(group), group.size()) == ("fake" if FAKE_RECEIVES else "gloo", 1)
    for reduce in (all_sum, all_max, all_mean):
        assert torch.equal(reduce(x, group), x)
    for start in (start_all_gather, start_reduce_scatter):
        assert torch.equal(start(x, group).wait(), x)
    found = [torch.zeros_like(x)]
    dist.all_gather(found, x, group=group)
    assert torch.equal(found[0], x)
    received = torch.zeros(6)
    dist.all_to_all_single(received, x.flatten(), [6], [6], group=group)
    assert torch.equal(received, x.flatten())
    kept = x.clone()
    broadcast_tensors([kept], group)
    dist.barrier(group)
    every: list[Any] = [None]
    dist.all_gather_object(every, {"rank": rank}, group=group)
    assert torch.equal(kept, x)
    assert every == [{"rank": rank}]
    mesh.destroy()
    if FAKE_RECEIVES:
        assert torch.equal(all_sum(x, group), x)  # the next mesh has it too
    with as_on_gpus():
        again = ContextParallelMesh(ulysses_size=world_size)
    assert (again.group("ring") is group) == FAKE_RECEIVES
    assert torch.equal(all_sum(x, again.group("ring")), x)
    again.destroy()


def test_one_rank_receives_what_it_has_sent() -> None:
    run_ranks(2, collectives)


def gloo_in_an_eager_world(rank: int, world_size: int) -> tuple[float, int]:
    """The world's communicator is a stand-in that counts splits."""
    world, device = groups._world(), torch.device("cuda", 0)
    communicator = mock.Mock()
    world.bound_device_id = device

    def split_by(source: object) -> Any:
        return mock.patch.object(dist.distributed_c10d, "_get_split_source", return_value=source)

    try:
        with split_by(communicator):
            pairs = groups.gloo_group(torch.arange(world_size).view(-1, 2))
            assert world.bound_device_id == device
            with pytest.raises(
                ConfigError, match=r"process groups \[\[0, 1\]\] do not hold each of 4"
            ):
                groups.gloo_group(torch.tensor([[0, 1]]))
            splits = communicator.perform_nocolor_split.call_count
        with split_by(communicator if rank > 1 else None):  # members would need a real one
            dist.new_group([0, 1], backend="gloo")  # one that a user makes
            alone = communicator.perform_nocolor_split.call_count - splits
    finally:
        world.bound_device_id = None
    assert alone == (rank > 1)
    return float(all_sum(torch.tensor(float(rank)), pairs)), splits


def test_gloo_groups_do_not_split_the_world_s_communicator() -> None:
    """PyTorch has each rank split it once for each group that it is not in; all others have to match that."""
    assert run_ranks(4, gloo_in_an_eager_world) == [(1.0, 0), (1.0, 0), (5.0, 0), (5.0, 0)]


def where_there_are_gpus(rank: int, world_size: int) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        mesh = ContextParallelMesh(ring_size=2, data_parallel_shard_size=2)
    for flat in (Flat.FSDP, Flat.LOSS):
        assert mesh.group(flat) is dist.group.WORLD
    assert mesh.group(Flat.CP) is not dist.group.WORLD
    mesh.destroy()


def test_axes_of_all_ranks_take_the_world_s_group_of_gloo_beside_gpus() -> None:
    """PyTorch makes another one, in 2.10 with NCCL, also for processes that share a GPU or compute on CPU."""
    run_ranks(4, where_there_are_gpus)


def trained(rank: int, world_size: int, cell: Cell) -> Outcome:
    with as_on_gpus():
        return execute(rank, world_size, cell)


@pytest.mark.parametrize(
    "cell",
    [
        Cell("fsdp", 1, tp=2, steps=3),
        Cell("hsdp", 1, data=2, steps=3),
        pytest.param(Cell("hsdp", 2, data=2, steps=3, driver="fabric"), marks=pytest.mark.nightly),
        pytest.param(Cell("zero1", 2, steps=3, optimizer="muon"), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_training_over_axes_of_one_rank(cell: Cell) -> None:
    """Parameters that are sharded over one rank, and replicated over others, or the reverse."""
    want = run_ranks(1, execute, cell.alone)[0]
    for got in run_ranks(cell.ranks, trained, cell):
        assert set(got.weights) == set(want.weights)
        for name, x in want.weights.items():
            torch.testing.assert_close(got.weights[name], x, rtol=1e-10, atol=1e-12)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    options: Any = group._get_backend(torch.device("cpu")).options
    return options._timeout


def timeouts(rank: int, world_size: int) -> set[timedelta]:
    world = dist.group.WORLD
    assert world is not None
    before = timeout_of(world)
    groups.set_timeout(timedelta(minutes=77), world)
    mesh = ContextParallelMesh(ring_size=2, data_parallel_shard_size=2)
    pairs = groups.gloo_group(torch.tensor([[0, 2], [1, 3]]))
    found = {timeout_of(group) for group in (pairs, *map(mesh.group, (*Axis, *Flat)))}
    mesh.destroy()
    groups.set_timeout(before, world)
    return found


def test_every_group_has_the_timeout_of_the_world() -> None:
    assert run_ranks(4, timeouts) == [{timedelta(minutes=77)}] * 4
