"""Which rows and columns a rank holds, against what it holds of a tensor whose entries say where they are."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_cp.errors import ConfigError
from lightning_cp.optim.placement import (
    ContiguousRun,
    LocalBlock,
    contiguous_runs,
    held_indices,
    sharded_dim,
)
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.optim.shardings import SHARDINGS, sharded
from tests.helpers.pool import run_ranks

SIZES = [(8, 8), (7, 5), (3, 9), (1, 1), (16, 3)]


def entries(rows: int, columns: int) -> torch.Tensor:
    """Each says where it is."""
    return torch.arange(rows * columns, dtype=torch.float64).view(rows, columns)


def composed(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    """All placements of two or three axes, uneven and empty parts included."""
    forget_meshes()
    mesh = init_device_mesh("cpu", shape)
    kinds: list[Any] = [Replicate(), Shard(0), Shard(1)]
    kinds += [_StridedShard(dim, split_factor=shape[-1]) for dim in (0, 1)]
    for rows, columns in SIZES:
        for placements in product(kinds, repeat=len(shape)):
            if any(type(one) is _StridedShard for one in placements[1:]):
                continue  # the outer of two axes is the interleaved one
            whole = entries(rows, columns)
            x = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            held = [held_indices(x, dim) for dim in (0, 1)]
            assert torch.equal(x.to_local(), whole[held[0]][:, held[1]]), placements
            assert torch.equal(held_indices(x, -1), held[1])
            part = LocalBlock(*(contiguous_runs(one) for one in held))
            assert part.numel == x.to_local().numel()
            message, back = torch.empty(part.numel), torch.zeros(rows, columns)
            part.pack(x.to_local(), message, whole=False)
            part.unpack(message, back, whole=True)
            wanted = torch.zeros(rows, columns)
            wanted[held[0].unsqueeze(1), held[1]] = whole[held[0]][:, held[1]].float()
            assert torch.equal(back, wanted)


@pytest.mark.quick("shape0", "shape2", "shape3")
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2), (4, 2), (2, 2, 2)])
def test_compositions(shape: tuple[int, ...]) -> None:
    run_ranks(prod(shape), composed, shape)


def of_a_model(rank: int, world_size: int, name: str) -> set[str]:
    """FSDP and tensor parallelism together, as they place parameters; the kinds of placements."""
    seen: set[str] = set()
    for _, p in sharded(name, torch.float64).named_parameters():
        assert isinstance(p, DTensor)
        whole = entries(p.shape[0], p.numel() // p.shape[0]).view(p.shape)
        with torch.no_grad():  # as FSDP itself would: each rank's part of what was gathered
            x = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        held = [held_indices(p, dim) for dim in range(p.ndim)]
        wanted = whole[held[0]] if p.ndim == 1 else whole[held[0]][:, held[1]]
        assert torch.equal(x.to_local(), wanted)
        assert x.to_local().shape == p.to_local().shape
        seen.update(type(placement).__name__ for placement in p.placements)
    return seen


@pytest.mark.quick("fsdp+tp 2x2", "hsdp+tp 2x2x2")
@pytest.mark.parametrize("name", [name for name in SHARDINGS if "+tp" in name])
def test_models(name: str) -> None:
    seen = run_ranks(prod(SHARDINGS[name]), of_a_model, name)[0]
    assert "_StridedShard" in seen


def weights_of_fsdp(rank: int, world_size: int, name: str) -> None:
    """Values that FSDP has sharded itself, of a model whose entries were known before."""
    before = sharded("plain", torch.float64)
    for (_, p), (_, whole) in zip(
        sharded(name, torch.float64).named_parameters(), before.named_parameters(), strict=True
    ):
        assert isinstance(p, DTensor)
        held = [held_indices(p, dim) for dim in range(p.ndim)]
        wanted = whole[held[0]] if p.ndim == 1 else whole[held[0]][:, held[1]]
        assert torch.equal(p.to_local(), wanted)


@pytest.mark.quick("hsdp+tp 2x2x2", "fsdp 4", "fsdp+tp 2x2", "hsdp 2x2")
@pytest.mark.parametrize("name", [name for name in SHARDINGS if SHARDINGS[name][1] > 1])
def test_what_fsdp_holds(name: str) -> None:
    run_ranks(prod(SHARDINGS[name]), weights_of_fsdp, name)


def test_pieces() -> None:
    """Runs go as far as both sides are side by side."""
    held = torch.tensor([0, 1, 4, 5, 6, 9])
    assert contiguous_runs(held) == (
        ContiguousRun(0, 0, 2),
        ContiguousRun(2, 4, 3),
        ContiguousRun(5, 9, 1),
    )
    assert contiguous_runs(held, torch.arange(5, 10)) == (
        ContiguousRun(3, 0, 2),
        ContiguousRun(5, 4, 1),
    )
    assert contiguous_runs(held, torch.tensor([7, 8])) == ()
    assert contiguous_runs(torch.tensor([], dtype=torch.int64)) == ()


def unknown(rank: int, world_size: int) -> None:
    """Sums that were not taken yet are nobody's values."""
    x: Any = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(ConfigError, match=r"Partial.*no rank holds"):
        held_indices(x, 0)
    with pytest.raises(ConfigError, match="Known: Replicate"):
        sharded_dim(Partial())


def test_unknown_placements_are_refused() -> None:
    run_ranks(2, unknown)
