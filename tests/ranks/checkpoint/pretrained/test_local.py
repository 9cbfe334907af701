"""Which rows and columns a rank holds, against what PyTorch puts there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_cp.checkpoint.pretrained.plan import LocalParts
from lightning_cp.errors import ConfigError
from lightning_cp.utils.dtensor import forget_meshes
from tests.helpers.pool import run_ranks

PLACEMENTS: list[list[Any]] = [
    [Shard(0), Shard(0)],
    [_StridedShard(0, split_factor=2), Shard(0)],
    [_StridedShard(1, split_factor=2), Shard(1)],
    [Shard(1), Shard(1)],
    [Shard(1), Shard(0)],
    [Replicate(), Shard(1)],
    [Shard(0), Replicate()],
    [Replicate(), Replicate()],
]
SHAPES = [(8, 12), (9, 7), (3, 5), (1, 4), (90, 2)]


def compare(rank: int, world: int) -> int:
    """Cells that were compared."""
    forget_meshes()
    mesh, parts, cells = init_device_mesh("cpu", (2, 2)), LocalParts(), 0
    for shape in SHAPES:
        x = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for placements in PLACEMENTS:
            made = distribute_tensor(x, mesh, placements, src_data_rank=None)
            found = x
            for dim, runs in enumerate(parts.of("x", made)):
                rows = [at for first, length in runs for at in range(first, first + length)]
                found = found.index_select(dim, torch.tensor(rows, dtype=torch.long))
            assert torch.equal(found, made.to_local()), (shape, placements)
            cells += 1
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    with pytest.raises(ConfigError, match=r"some.weight has placements .*partial sum"):
        parts.of("some.weight", partial)
    return cells


def test_the_rows_of_every_placement() -> None:
    assert run_ranks(4, compare) == [len(SHAPES) * len(PLACEMENTS)] * 4
