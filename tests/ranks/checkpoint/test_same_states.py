"""States and paths that differ between ranks: what one of them alone has would be lost, so none is saved."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_cp.checkpoint import sharded as sharded_plan
from lightning_cp.checkpoint.consistency import check_same_states
from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.save import save_checkpoint
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.meshes import mesh_of
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING
from tests.ranks.strategies.test_fabric import Loop

FORMS = ("full", "sharded")


def other_states(rank: int) -> list[tuple[dict[str, Any], str]]:
    """What a rank saves, and what is said of it."""
    spread = distribute_tensor(torch.arange(8.0), mesh_of(2), [Shard(0)])
    whole = torch.ones(3)
    one, two = {"w": spread}, {"w": spread, "o": {"m": [spread]}}
    other = distribute_tensor(torch.arange(4.0), mesh_of(2), [Shard(0)])
    return [
        ((one, two)[rank], "rank 1 also has 'o'"),
        ((two, one)[rank], "rank 1 has no 'o'"),
        ({**one, **({"extra": 1} if rank else {})}, "rank 1 also has 'extra'"),
        (({"m": {"a": whole}}, {"m": {"a": whole, "b": whole}})[rank], "rank 1 also has 'm.b'"),
        (({"m": {"a": whole, "b": whole}}, {"m": {"a": whole}})[rank], "rank 1 has no 'm.b'"),
        ({"m": {"w": (spread, whole)[rank]}}, "rank 1 has another 'm.w'"),
        ({"m": [(spread, other)[rank]]}, "rank 1 has another 'm.0'"),
    ]


def refused(rank: int, world: int, form: str) -> list[str]:
    said = []
    for at, (state, match) in enumerate(other_states(rank)):
        with pytest.raises(CheckpointError, match=match) as raised:
            save_checkpoint(state, Path(f"folder-{at}", "a"), form=form)
        said.append(str(raised.value))
    names = r"different paths: a-0 on rank 0, a-1 on rank 1"
    with pytest.raises(CheckpointError, match=names) as raised:
        save_checkpoint({"x": 1}, Path("folder-x", f"a-{rank}").absolute(), form=form)
    said.append(str(raised.value))
    # what differs is shown, also where that is not the end
    names = r"different paths: .*run-0/checkpoints/a on rank 0, .*run-1/checkpoints/a on rank 1"
    with pytest.raises(CheckpointError, match=names) as raised:
        save_checkpoint({"x": 1}, Path("/", f"run-{rank}", "checkpoints", "a"), form=form)
    dist.barrier()
    assert list(Path().iterdir()) == [], "something was written"
    return [*said, str(raised.value)]


@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_save_different_states_are_told_on_every_rank(form: str) -> None:
    first, second = run_ranks(2, refused, form)
    assert first == second
    assert all(x.count("still there") == 1 for x in first)


def allowed(rank: int, world: int, form: str) -> None:
    """Plain values, of whatever shape, and whole tensors are the first rank's."""
    spread = distribute_tensor(torch.arange(8.0), mesh_of(2), [Shard(0)])
    state = {
        "w": spread,
        "random": torch.full((2 + rank,), rank),
        "seconds": {"forward": 1.5 + rank, f"only on {rank}": 1},
        "best": None if rank else torch.ones(1),
        "seen": [torch.ones(rank)] * rank,
        **({} if rank else {"config": {"lr": 0.1}}),
    }
    save_checkpoint(state, Path("a"), form=form)
    read = open_checkpoint(Path("a")).read()
    assert read["random"].tolist() == [0, 0]
    assert read["seconds"] == {"forward": 1.5, "only on 0": 1}
    assert read["config"] == {"lr": 0.1}


def from_another_folder(rank: int, world: int, form: str) -> str:
    """One path, seen from two working directories."""
    own = Path(f"of-{rank}")
    own.mkdir()
    os.chdir(own)
    spread = distribute_tensor(torch.arange(8.0), mesh_of(2), [Shard(0)])
    try:
        with mock.patch.object(sharded_plan, "_SEEN", 0.1):
            save_checkpoint({"w": spread}, Path("deep", "a"), form=form)
    except CheckpointError as error:
        return str(error)
    finally:
        dist.barrier()
        os.chdir("..")
    return "" if rank or Path("of-0", "deep", "a").exists() else "nothing was saved"


def test_parts_of_all_ranks_need_a_folder_that_all_see() -> None:
    assert run_ranks(2, from_another_folder, "full") == ["", ""]
    first, second = run_ranks(2, from_another_folder, "sharded")
    for said in (first, second):
        assert "does not see" in said
        assert "of-1/deep, in which rank 0 has made a folder" in said
        assert "all ranks share" in said


class Twins(World):
    """Two ranks that say the same, in one process."""

    def gather(self, value: Any) -> list[Any]:
        return pickle.loads(pickle.dumps([value, value]))


def test_what_is_plain_takes_no_memory() -> None:
    """The most memory that comparing takes where a state has a long list.

    Not on ranks: gloo's threads take Python's lock to free the last message, and Python 3.11 crashes if
    tracemalloc ends meanwhile.
    """
    tree = {"seen": [*range(100_000)], "w": torch.ones(1)}
    tracemalloc.start()
    check_same_states(Twins(), Path("a"), lambda: tree)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000


@pytest.mark.parametrize("form", FORMS)
def test_plain_values_may_differ(form: str) -> None:
    run_ranks(2, allowed, form)


def by_fabric(rank: int, world: int, form: str) -> None:
    loop = Loop(world, {**RING, "data_parallel": "fsdp", "checkpoint": form})
    state = {"model": loop.model, **({"optimizer": loop.optimizer} if rank else {})}
    match = "ranks save different states: rank 1 also has 'optimizer'"
    with pytest.raises(CheckpointError, match=match):
        loop.fabric.save("a", state)
    strategy: Any = loop.fabric.strategy
    own = {"model": loop.model, **({"run": strategy.run_state} if rank else {})}
    with pytest.raises(CheckpointError, match="rank 1 also has 'run'"):
        loop.fabric.save("a", own)
    assert not Path("a").exists()
    loop.end()


@pytest.mark.parametrize("form", FORMS)
def test_nor_does_fabric_save_them(form: str) -> None:
    run_ranks(2, by_fabric, form)
