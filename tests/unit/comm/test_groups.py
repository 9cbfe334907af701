"""Groups of a mesh in a world of one process: their number, as on GPUs, and partitions that would hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cp.comm import groups
from lightning_cp.comm.groups import gloo_group, group_of
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.versions import FAKE_RECEIVES

RANKS = 8


@pytest.fixture
def _world() -> Iterator[None]:
    dist.init_process_group("fake", rank=3, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Partitions that were split off the world's communicator, which exists."""
    found: list[list[list[int]]] = []

    def split_group(split_ranks: list[list[int]]) -> Any:
        found.append(split_ranks)
        own, _ = dist.new_subgroups_by_enumeration(split_ranks)
        return own

    monkeypatch.setattr(groups, "_is_eager", lambda world: True)
    monkeypatch.setattr(groups.dist, "split_group", split_group)
    return found


def counted() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ({"ring_size": 2, "ulysses_size": 4}, ["ring", "ulysses"]),
        ({"ring_size": 8}, []),
        ({"ring_size": 4, "data_parallel_shard_size": 2}, ["dp_shard", "ring", "cp", "data"]),
        ({"data_parallel_replicate_size": 8}, []),
    ],
)
def test_axes_of_size_1_have_no_communicator(
    sizes: dict[str, Any], made: list[str], splits: list[list[list[int]]]
) -> None:
    """Each of five axes, and of four flattened ones, had its own. Without a group of fake they share one."""
    for _ in range(2):  # the second time after all were destroyed
        mesh = ContextParallelMesh(**sizes)
        alone, world = mesh.group(Axis.TP), dist.group.WORLD
        assert alone.size() == 1
        for axis in (*Axis, *Flat):
            group, size = mesh.group(axis), mesh.axis_mesh(axis).size()
            assert (group is alone) == (size == 1)
            assert axis in made or group is (alone if size == 1 else world)
        assert counted() == 2 + len(made)
        shared = 0 if FAKE_RECEIVES else 1
        assert len(splits) == shared + len([axis for axis in made if axis in set(Axis)])
        splits.clear()
        mesh.destroy()
        assert counted() == 2 - shared


@pytest.mark.usefixtures("_world", "splits")
@pytest.mark.parametrize("make", [gloo_group, group_of])
@pytest.mark.parametrize("partition", [[[0, 1, 2, 3]], [[0, 1], [1, 2], [3, 4], [5, 6]]])
def test_groups_over_part_of_the_world_are_refused(make: Any, partition: list[list[int]]) -> None:
    """Ranks outside would split the communicator once more than the others."""
    match = "do not hold each of 8 ranks once, so NCCL would wait forever.*new_subgroups_by"
    with pytest.raises(ConfigError, match=match):
        make(torch.tensor(partition))
    assert counted() == 1


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("lacks", [False, True])
def test_gloo_groups_of_one_rank_split_nothing(
    lacks: bool, splits: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a group of fake they are of gloo: one of NCCL would send nothing between CPUs."""
    if lacks:
        monkeypatch.setattr(groups, "_is_exact", lambda group: False)
    group = gloo_group(torch.arange(RANKS).view(-1, 1))
    assert dist.get_process_group_ranks(group) == [3]
    assert (splits, counted()) == ([], 2)


def refuse(*_: object, **__: object) -> Any:
    raise RuntimeError("Backend fake does not support eagerConnectSingleDevice")


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("lacks", ["it cannot be made", "it leaves results empty"])
def test_without_a_group_of_fake_all_axes_of_size_1_share_a_communicator(
    lacks: str, splits: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if lacks == "it cannot be made":
            patch.setattr(groups, "_is_exact", pytest.fail)
            own = dist.new_group
            patch.setattr(
                groups.dist,
                "new_group",
                lambda *args, **more: (refuse if "group_desc" in more else own)(*args, **more),
            )
        else:
            patch.setattr(groups, "_is_exact", lambda group: False)
        mesh = ContextParallelMesh(ring_size=4, ulysses_size=2)
    assert [len(split[0]) for split in splits] == [1, 4, 2]
    assert mesh.group(Axis.TP) is mesh.group(Axis.DP_SHARD) is mesh.group(Flat.DATA)
    assert counted() == 4
    mesh.destroy()
    assert counted() == 1
