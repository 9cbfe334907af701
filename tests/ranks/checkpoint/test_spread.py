"""Tensors that are spread over ranks: told apart by their places, and refused where their shards are odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import plan_save, save_checkpoint
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.meshes import mesh_of
from tests.helpers.pool import run_ranks

FORMS = ("full", "sharded")
PLACES: tuple[tuple[Any, Any], ...] = (("m", "x.w"), ("m.x", "w"), ("m", 1), ("m", "1"))


def has_the_same_dotted_names(rank: int, world: int, form: str) -> None:
    """Of two tensors ``m.x.w`` and two ``m.1``, as ``{"model": gan, "model.generator": generator}`` has."""
    mesh = mesh_of(world)
    want = {place: torch.arange(8.0) + 100 * at for at, place in enumerate(PLACES)}
    spread = {place: distribute_tensor(x, mesh, [Shard(0)]) for place, x in want.items()}
    tree: dict[str, Any] = {"m": {}, "m.x": {}}
    for place, x in spread.items():
        tree[place[0]][place[1]] = x
    save_checkpoint(tree, Path("a"), form=form)
    opened = open_checkpoint(Path("a"), World())
    whole, shards = opened.read(), opened.read(spread.get)
    for place in PLACES:
        assert torch.equal(whole[place[0]][place[1]], want[place]), place
        shard = shards[place[0]][place[1]]
        assert isinstance(shard, DTensor)
        assert torch.equal(shard.to_local(), spread[place].to_local()), place


@pytest.mark.parametrize("form", FORMS)
def test_the_same_dotted_name_twice(form: str) -> None:
    run_ranks(2, has_the_same_dotted_names, form)


def copies(rank: int, world: int) -> None:
    """Of a spread tensor the first rank has a whole one that nobody else has, but of a replica."""
    mesh = mesh_of(world)
    value = torch.arange(8.0)
    tree = {
        "spread": distribute_tensor(value.clone(), mesh, [Shard(0)]),
        "replica": distribute_tensor(value.clone(), mesh, [Replicate()]),
        "plain": value.clone(),
        "part": value.clone()[2:4],
    }
    planned: Any = plan_save(tree, Path("a"))[0]
    if rank:
        planned.copy()
        return
    before = dict(planned.tree)
    planned.copy()
    for name, x in tree.items():
        taken = planned.tree[name]
        assert (taken is before[name]) == (name in ("spread", "part")), name
        (x.to_local() if isinstance(x, DTensor) else x).zero_()
        assert torch.equal(taken, value[2:4] if name == "part" else value), name


def test_what_was_gathered_is_not_copied_again() -> None:
    run_ranks(2, copies)


def refused(tensor: DTensor) -> str:
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint({"head.weight": tensor}, Path("a"), form="sharded")
    dist.barrier()
    assert list(Path().iterdir()) == []
    return str(raised.value)


def saves_uneven_shards(rank: int, world: int) -> str:
    """Of 4 rows the first rank holds 3."""
    local = torch.ones(1 if rank else 3, 2)
    size, stride = torch.Size([4, 2]), (2, 1)
    return refused(DTensor.from_local(local, mesh_of(world), [Shard(0)], shape=size, stride=stride))


def test_a_shard_that_is_not_where_its_placements_say_is_refused() -> None:
    first, second = run_ranks(2, saves_uneven_shards)
    assert "head.weight [4, 2] is spread unevenly: its placements say that this rank holds" in first
    assert "a block of [2, 2], and it holds [3, 2]" in first
    assert "a block of [2, 2], and it holds [1, 2]" in second


def saves_what_fsdp_has_cut(rank: int, world: int) -> str:
    """FSDP2 cuts what tensor parallelism has left of 9 rows: its blocks are not those of the placements."""
    module = nn.Module()
    module.head = nn.Linear(3, 9, bias=False)
    want = torch.arange(27.0).view(9, 3)
    with torch.no_grad():
        module.head.weight.copy_(want)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    parallelize_module(module, mesh["tp"], {"head": ColwiseParallel()})
    fully_shard(module, mesh=mesh["fsdp"])
    spread: Any = module.head.weight
    said = refused(spread.detach())
    save_checkpoint({"head.weight": spread}, Path("a"))  # as the error says
    assert torch.equal(open_checkpoint(Path("a"), World()).read()["head.weight"], want)
    return said


@pytest.mark.nightly
def test_what_fsdp_has_cut_unevenly_is_refused_by_name() -> None:
    for said in run_ranks(8, saves_what_fsdp_has_cut):
        assert "head.weight [9, 3] is spread unevenly" in said
