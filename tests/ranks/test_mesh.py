"""The mesh: which ranks share what, sharding and putting together, and what is refused."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lightning_cp.mesh as mesh_module
from lightning_cp.comm.groups import gloo_group
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.axes import Axis, Flat, factorise
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.pool import expect_on_every_rank, run_ranks

GRIDS = [(2, 1), (1, 2), (3, 1), (2, 2), (4, 2), (2, 4)]
KINDS = ["zigzag", "contiguous", "balanced"]


@pytest.mark.parametrize(
    ("cp_size", "num_heads", "per_node", "ulysses", "ring"),
    [
        (8, 32, None, 8, 1),
        (24, 32, None, 8, 3),
        (7, 32, None, 1, 7),
        (6, 9, None, 3, 2),
        (1, 32, None, 1, 1),
        (8, 1, None, 1, 8),
        (64, 32, None, 32, 2),
        (64, 32, 8, 8, 8),
        (6, 12, 4, 3, 2),  # 6 divides both, but does not fit a node; nor does 4 divide 6
        (6, 12, 1, 1, 6),
    ],
)
def test_factorise(
    cp_size: int, num_heads: int, per_node: int | None, ulysses: int, ring: int
) -> None:
    found = factorise(cp_size, num_heads, per_node)
    assert (found.ulysses_size, found.ring_size) == (ulysses, ring)
    assert f"{num_heads} heads, {cp_size} ranks" in found.why
    limited = per_node is not None and ulysses < factorise(cp_size, num_heads).ulysses_size
    assert (f"at most {per_node} ranks of one node" in found.why) == limited


def coordinates(rank: int, world_size: int) -> dict[str, Any]:
    mesh = ContextParallelMesh(ring_size=2, ulysses_size=2, data_parallel_shard_size=2)
    groups = {str(axis): dist.get_process_group_ranks(mesh.group(axis)) for axis in (*Axis, *Flat)}
    assert mesh.control_group(Flat.CP) is mesh.group(Flat.CP)
    assert mesh.group("cp") is mesh.group(Flat.CP)
    assert (mesh.cp_size, mesh.data_size) == (4, 2)
    ranks = (mesh.data_rank, mesh.cp_rank, mesh.ring_rank, mesh.ulysses_rank)
    mesh.destroy()
    return {"ranks": ranks, "groups": groups}


def test_ring_lies_outside_ulysses_and_data_outside_both() -> None:
    """Ranks count through ulysses first: rank = data * 4 + ring * 2 + ulysses."""
    for rank, found in enumerate(run_ranks(8, coordinates)):
        data, cp = divmod(rank, 4)
        ring, ulysses = divmod(cp, 2)
        assert found["ranks"] == (data, cp, ring, ulysses)
        whole = [data * 4 + other for other in range(4)]
        assert found["groups"] == {
            "dp_replicate": [rank],
            "dp_shard": [cp, cp + 4],
            "ring": [data * 4 + ulysses, data * 4 + 2 + ulysses],
            "ulysses": [data * 4 + ring * 2, data * 4 + ring * 2 + 1],
            "tp": [rank],
            "cp": whole,
            "fsdp": list(range(8)),
            "data": [cp, cp + 4],
            "loss": list(range(8)),
        }


def replicas(rank: int, world_size: int) -> tuple[int, list[int], list[int]]:
    mesh = ContextParallelMesh(ulysses_size=2, data_parallel_replicate_size=2)
    found = dist.get_process_group_ranks(mesh.group(Flat.LOSS))
    fsdp = dist.get_process_group_ranks(mesh.group(Flat.FSDP))
    return mesh.data_rank, fsdp, found


def test_replicas_have_a_state_each_and_one_loss() -> None:
    for rank, (data, fsdp, loss) in enumerate(run_ranks(4, replicas)):
        assert data == rank // 2
        assert fsdp == [data * 2, data * 2 + 1]
        assert loss == [0, 1, 2, 3]


def round_trip(rank: int, world_size: int, ring: int, ulysses: int, kind: Any) -> None:
    mesh = ContextParallelMesh(ring_size=ring, ulysses_size=ulysses)
    for length in (37, 48):
        layout = SequenceLayout(length, ring, ulysses, kind)
        x = torch.randn(2, length, 3, dtype=torch.float64)
        with mock.patch.object(dist, "all_gather", side_effect=AssertionError):
            shard = mesh.shard(x, layout, pad_value=torch.nan)  # sharding is local
        positions = layout.positions(mesh.cp_rank)
        assert shard.shape == (2, layout.local_len, 3)
        assert torch.equal(shard[:, positions < length], x[:, positions[positions < length]])
        assert shard[:, positions >= length].isnan().all()
        assert torch.equal(mesh.unshard(shard, layout), x)
        ids = torch.arange(length)
        assert torch.equal(mesh.unshard(mesh.shard(ids, layout, dim=0), layout, dim=0), ids)
        transposed = mesh.shard(x.transpose(1, 2), layout, dim=-1)
        assert torch.equal(mesh.unshard(transposed, layout, dim=-1), x.transpose(1, 2))
    mesh.destroy()


@pytest.mark.quick(
    "zigzag-2-2", "contiguous-2-1", "contiguous-1-2", "balanced-2-1", "balanced-3-1", "zigzag-1-2"
)
@pytest.mark.parametrize(("ring", "ulysses"), GRIDS)
@pytest.mark.parametrize("kind", KINDS)
def test_shard_and_unshard_are_inverse(ring: int, ulysses: int, kind: str) -> None:
    run_ranks(ring * ulysses, round_trip, ring, ulysses, kind)


def unshard_gradient(rank: int, world_size: int) -> None:
    """Each rank weights the whole sequence by its own numbers: gradients of all ranks add up."""
    mesh = ContextParallelMesh(ring_size=2, ulysses_size=2)
    layout = SequenceLayout(21, 2, 2)
    x = torch.randn(2, 21, 3, dtype=torch.float64)
    weights = torch.randn(world_size, 2, 21, 3, dtype=torch.float64)
    shard = mesh.shard(x, layout).requires_grad_()
    (mesh.unshard(shard, layout) * weights[rank]).sum().backward()
    assert shard.grad is not None
    expected = mesh.shard(weights.sum(0), layout)  # the gradient of padding is 0
    torch.testing.assert_close(shard.grad, expected, rtol=0, atol=1e-14)


def test_the_gradient_of_unshard_is_summed_over_ranks() -> None:
    run_ranks(4, unshard_gradient)


def one_rank(rank: int, world_size: int) -> None:
    mesh = ContextParallelMesh()
    layout = SequenceLayout(5)
    x = torch.arange(10.0).view(2, 5).requires_grad_()
    with mock.patch.object(dist, "all_gather", side_effect=AssertionError):
        whole = mesh.unshard(mesh.shard(x, layout), layout)
    assert torch.equal(whole, x)
    whole.sum().backward()
    assert x.grad is not None
    assert x.grad.eq(1).all()


def test_one_rank_communicates_nothing() -> None:
    run_ranks(1, one_rank)


def num_groups() -> int:
    """Process groups that exist now."""
    return len(dist.distributed_c10d._world.pg_map)


def make_and_destroy(rank: int, world_size: int) -> tuple[int, int, int]:
    before = num_groups()
    mesh = ContextParallelMesh(ring_size=2, ulysses_size=2)
    made = num_groups()
    for axis in (*Axis, *Flat):
        assert mesh.group(axis) is mesh.group(axis)
    layout = SequenceLayout(16, 2, 2)
    x = torch.arange(16.0).unsqueeze(0)
    assert torch.equal(mesh.unshard(mesh.shard(x, layout), layout), x)
    assert num_groups() == made, "groups were made after the mesh was"
    mesh.destroy()
    after = num_groups()
    mesh.destroy()
    total = torch.ones(1)
    dist.all_reduce(total)  # the world group stays
    assert total.item() == world_size
    return before, made, after


def test_groups_are_made_once_and_destroyed_once() -> None:
    for before, made, after in run_ranks(4, make_and_destroy):
        assert made > before
        assert after == before


def make_two(rank: int, world_size: int) -> None:
    first = ContextParallelMesh(ring_size=2)
    second = ContextParallelMesh(ulysses_size=2)
    first.destroy()
    layout = SequenceLayout(8, 1, 2)
    x = torch.arange(8.0).unsqueeze(0)
    assert torch.equal(second.unshard(second.shard(x, layout), layout), x)
    second.destroy()


def test_meshes_do_not_share_groups() -> None:
    run_ranks(2, make_two)


def make_between_others(rank: int, world_size: int) -> None:
    first = ContextParallelMesh(ring_size=2)
    second = ContextParallelMesh(ring_size=2)
    first.destroy()
    third = ContextParallelMesh(ring_size=2)
    second.destroy()
    third.destroy()


def test_a_mesh_is_made_while_another_lives_and_a_third_is_gone() -> None:
    run_ranks(2, make_between_others)


HELD = """
import atexit

atexit.register(lambda: print(*(group() is None for group in seen)))  # after all that is registered later

import sys
import weakref

import torch
import torch.distributed as dist

from lightning_cp import ContextParallelMesh

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
torch.held = ContextParallelMesh()
seen = [weakref.ref(torch.held.group(axis)) for axis in ("ring", "loss")]
dist.destroy_process_group()
print(*(group() is None for group in seen))
"""


@pytest.mark.nightly
def test_no_group_outlives_a_program_that_keeps_its_mesh(tmp_path: Path) -> None:
    """It would abort the process, where another rank had gone before."""
    command = [sys.executable, "-W", "ignore", "-c", HELD, str(tmp_path / "store")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [
        line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")
    ]  # torch 2.10
    assert " ".join(said).split() == ["False", "False", "True", "True"]


def keep_what_pytorch_knows(rank: int, world_size: int) -> None:
    mesh = ContextParallelMesh(ring_size=2)
    kept = mesh.axis_mesh(Flat.FSDP)
    del mesh
    gc.collect()
    for compiling in (False, True):  # it is looked up elsewhere then
        with mock.patch.object(torch.compiler, "is_compiling", return_value=compiling):
            assert kept.get_group().size() == 2


def test_a_device_mesh_outlives_what_made_it() -> None:
    run_ranks(2, keep_what_pytorch_knows)


def twin(rank: int, world_size: int) -> list[int]:
    """What a mesh on CUDA adds: a gloo group for each of its groups of one kind."""
    mesh = ContextParallelMesh(ring_size=2, data_parallel_shard_size=2)
    made = gloo_group(torch.arange(4).view(2, 2))
    assert dist.get_process_group_ranks(made) == dist.get_process_group_ranks(mesh.group(Flat.CP))
    ranks = torch.tensor([rank])
    gathered = [torch.empty_like(ranks) for _ in range(made.size())]
    dist.all_gather(gathered, ranks, group=made)
    return [int(other) for other in gathered]


def test_a_group_on_an_accelerator_has_a_twin_on_cpu() -> None:
    assert run_ranks(4, twin) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def slice_nothing(rank: int, world_size: int) -> None:
    mesh = ContextParallelMesh(ring_size=2, data_parallel_shard_size=2)
    with mock.patch.object(type(mesh.device_mesh), "__getitem__", side_effect=AssertionError):
        for axis in (*Axis, *Flat):
            assert mesh.group(axis) is mesh.group(axis.value)
            assert mesh.axis_mesh(axis).get_group() is mesh.group(axis)
        assert mesh.ring_rank == mesh.cp_rank == rank % 2
        assert mesh.ulysses_rank == 0
    with pytest.raises(ValueError, match="'hop' is not a valid Axis"):
        mesh.group("hop")


def test_groups_are_looked_up_and_not_sliced_anew() -> None:
    run_ranks(4, slice_nothing)


def groups_made(rank: int, world_size: int, sizes: dict[str, Any]) -> int:
    before = num_groups()
    mesh = ContextParallelMesh(**sizes)
    made = num_groups() - before
    assert mesh.group(Axis.TP).size() == 1
    assert mesh.axis_mesh(Flat.DATA).size() == mesh.group(Flat.DATA).size() == mesh.data_size
    mesh.destroy()
    assert num_groups() == before
    return made


@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ({"ulysses_size": 4}, 1),  # one for all axes of one rank
        ({"ring_size": 4}, 1),
        ({"ring_size": 2, "ulysses_size": 2}, 3),
        ({"ulysses_size": 2, "data_parallel_shard_size": 2}, 5),  # cp and data have their own
    ],
    ids=str,
)
def test_axes_of_the_same_ranks_share_a_group(sizes: dict[str, int], made: int) -> None:
    """Each gloo group keeps threads that wake up a hundred times a second."""
    assert run_ranks(4, groups_made, sizes) == [made] * 4


def made_and_returned(rank: int, world_size: int) -> tuple[float, float]:
    own, made = ContextParallelMesh._control_groups, 0.0

    def groups(mesh: ContextParallelMesh) -> Any:
        nonlocal made
        time.sleep(0.2 * (rank == 1))
        made = time.monotonic()
        return own(mesh)

    with mock.patch.object(ContextParallelMesh, "_control_groups", groups):
        ContextParallelMesh(ring_size=2, ulysses_size=2)
    return made, time.monotonic()


def test_no_rank_has_a_mesh_before_all_have_made_their_groups() -> None:
    """Gloo connects on one side first: a rank that destroyed its groups at once cut the others off."""
    made, returned = zip(*run_ranks(4, made_and_returned), strict=True)
    assert max(made) < min(returned)


def warm(rank: int, world_size: int, sizes: dict[str, int]) -> list[list[int]]:
    """The groups in which a mesh on CUDA makes a collective call when it is made, on CPU's backend."""
    called: list[list[int]] = []
    own = mesh_module.warm_up

    def warm_up(ring: dist.ProcessGroup, device: torch.device) -> None:
        assert device.type == "cuda"
        own(ring, torch.device("cpu"))
        called.append(dist.get_process_group_ranks(ring))

    on_cpu = mesh_module.mesh_of_groups
    with (
        mock.patch.object(mesh_module, "warm_up", warm_up),
        mock.patch.object(mesh_module, "mesh_of_groups", lambda _, *a, **k: on_cpu("cpu", *a, **k)),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        ContextParallelMesh(**sizes, device_type="cuda")
    return called


def test_the_ring_on_cuda_is_connected_when_it_is_made() -> None:
    assert run_ranks(4, warm, {"ring_size": 2, "ulysses_size": 2}) == [
        [[0, 2]],
        [[1, 3]],
        [[0, 2]],
        [[1, 3]],
    ]
    assert run_ranks(2, warm, {"ulysses_size": 2}) == [[], []]  # a ring of one must not call


def make(rank: int, world_size: int, sizes: dict[str, Any]) -> None:
    before = num_groups()
    try:
        ContextParallelMesh(**sizes)
    finally:
        assert num_groups() == before


def test_sizes_must_multiply_to_the_world() -> None:
    sizes = {"ring_size": 2, "ulysses_size": 3, "data_parallel_shard_size": 5}
    shown = "dp_replicate=1 x dp_shard=5 x ring=2 x ulysses=3 x tp=1 = 30"
    expect_on_every_rank(
        4,
        make,
        sizes,
        error=ConfigError,
        match=f"must multiply to the world size 4, got {re.escape(shown)}",
    )


@pytest.mark.parametrize("size", [0, -2, 2.0, "2", True, None], ids=repr)
@pytest.mark.parametrize(
    ("argument", "axis"),
    [
        ("data_parallel_replicate_size", "dp_replicate"),
        ("data_parallel_shard_size", "dp_shard"),
        ("ring_size", "ring"),
        ("ulysses_size", "ulysses"),
        ("tensor_parallel_size", "tp"),
    ],
)
def test_a_size_is_a_positive_integer(argument: str, axis: str, size: Any) -> None:
    match = re.escape(f"mesh axis {axis} must be an integer of at least 1, got {size!r}")
    with pytest.raises(ConfigError, match=match):
        ContextParallelMesh(**{argument: size})


def test_torch_distributed_must_be_initialised() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"needs torch.distributed to be initialised"):
        ContextParallelMesh()


def shard_wrongly(rank: int, world_size: int, case: str) -> None:
    mesh = ContextParallelMesh(ring_size=2)
    x = torch.zeros(1, 8)
    if case == "shard for another mesh":
        mesh.shard(x, SequenceLayout(8, 1, 2))
    elif case == "unshard for another mesh":
        mesh.unshard(x[:, :4], SequenceLayout(8, 1, 2))
    elif case == "shard twice":
        mesh.shard(mesh.shard(x, SequenceLayout(8, 2)), SequenceLayout(8, 2))
    else:
        mesh.unshard(x, SequenceLayout(8, 2))


@pytest.mark.parametrize(
    ("case", "error", "match"),
    [
        ("shard for another mesh", ConfigError, "layout is for ring_size=1, ulysses_size=2, but"),
        ("unshard for another mesh", ConfigError, "but the mesh has ring_size=2, ulysses_size=1"),
        ("shard twice", ShapeError, "was it sharded already"),
        ("unshard the whole", ShapeError, "expects a local shard, 4 entries along dim 1"),
    ],
)
def test_layouts_and_tensors_that_do_not_fit(case: str, error: type[Exception], match: str) -> None:
    expect_on_every_rank(2, shard_wrongly, case, error=error, match=match)


def test_it_says_what_it_is() -> None:
    shown = "ContextParallelMesh(dp_replicate=1, dp_shard=1, ring=2, ulysses=1, tp=1"
    assert all(text.startswith(shown) for text in run_ranks(2, show))


def show(rank: int, world_size: int) -> str:
    return repr(ContextParallelMesh(ring_size=2))
