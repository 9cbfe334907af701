"""What tensor-parallel ranks cannot share in equal parts, by whichever plan."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_cp.engines.tensor_parallel import share_layers
from lightning_cp.errors import ConfigError
from lightning_cp.mesh import ContextParallelMesh
from tests.helpers.pool import run_ranks

GIVEN: dict[str, Any] = {
    "vocabulary": {"embed": "vocabulary_embedding"},
    "columns": {"wide": "colwise"},
    "rows": {"up": "rowwise"},
    "pytorch": {"wide": ColwiseParallel()},
    "function": lambda model, mesh: parallelize_module(model, mesh, {"wide": ColwiseParallel()}),
}
SAYS = {
    "vocabulary": "embed.weight of shape [9, 3] along its dimension 0: 9 does not divide by",
    "columns": "wide.weight of shape [9, 4] along its dimension 0: 9 does not divide by",
    "rows": "up.weight of shape [4, 3] along its dimension 1: 3 does not divide by",
}


def refused(rank: int, world: int, kind: str) -> None:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        embed=nn.Embedding(9, 3), up=nn.Linear(3, 4), wide=nn.Linear(4, 9)
    )
    mesh = ContextParallelMesh(device_type="cpu", tensor_parallel_size=world)
    says = "tensor_parallel_plan shards " + SAYS.get(kind, SAYS["columns"])
    with pytest.raises(ConfigError, match=re.escape(f"{says} tensor_parallel_size={world}")):
        share_layers(nn.Sequential(layers), mesh, GIVEN[kind])


@pytest.mark.parametrize(
    "kind", [x if x == "vocabulary" else pytest.param(x, marks=pytest.mark.nightly) for x in GIVEN]
)
def test_what_does_not_divide_is_refused_by_name(kind: str) -> None:
    run_ranks(2, refused, kind)
