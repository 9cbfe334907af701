"""A small model, sharded in every way that there is, and what one process makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_cp.utils.dtensor import forget_meshes

SHARDINGS: dict[str, tuple[int, int, int]] = {
    "plain": (1, 1, 1),
    "ddp 2": (2, 1, 1),
    "ddp 4": (4, 1, 1),
    "fsdp 2": (1, 2, 1),
    "fsdp 4": (1, 4, 1),
    "hsdp 2x2": (2, 2, 1),
    "tp 2": (1, 1, 2),
    "tp 4": (1, 1, 4),
    "fsdp+tp 2x2": (1, 2, 2),
    "fsdp+tp 4x2": (1, 4, 2),
    "hsdp+tp 2x2x2": (2, 2, 2),
}
"""Sizes of dp_replicate, fsdp and tp; parameters of ddp are plain tensors."""


class Layer(nn.Module):
    """Sizes that do not divide: 3 rows leave ranks without any."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(12, 20)
        self.down_proj = nn.Linear(20, 12)
        self.odd = nn.Linear(12, 7, bias=False)
        self.few = nn.Linear(16, 3, bias=False)
        self.norm = nn.LayerNorm(12)


class Model(nn.Module):
    """Nothing is called: gradients are made up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 12)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(12, 10, bias=False)


TP = {"up_proj": ColwiseParallel, "down_proj": RowwiseParallel}
"""Both dimensions; up_proj's rows are sharded by fsdp as well: a ``_StridedShard``."""


def whole(dtype: torch.dtype) -> Model:
    """The model of one process."""
    torch.manual_seed(3)
    return Model().to(dtype)


def sharded(name: str, dtype: torch.dtype) -> Model:
    """The same on this rank's mesh."""
    model, (copies, shards, tp) = whole(dtype), SHARDINGS[name]
    forget_meshes()  # of earlier cases, whose groups are gone
    if tp > 1:
        mesh = init_device_mesh("cpu", (copies, shards, tp), mesh_dim_names=("dp", "fsdp", "tp"))
        for layer in model.layers:
            plan: dict[str, Any] = {part: kind() for part, kind in TP.items()}
            parallelize_module(layer, mesh["tp"], plan)
    elif shards > 1:
        mesh = init_device_mesh("cpu", (copies, shards), mesh_dim_names=("dp", "fsdp"))
    else:
        return model
    if shards > 1 or copies > 1:
        at = mesh["dp", "fsdp"] if copies > 1 else mesh["fsdp"]
        for layer in model.layers:
            fully_shard(layer, mesh=at)
        fully_shard(model, mesh=at)
    return model


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Of one process, made up: of parameters by name."""
    draw = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
        for name, p in model.named_parameters()
    }


def give(model: nn.Module, grads: Mapping[str, torch.Tensor]) -> None:
    """Each rank gets what it holds of them."""
    for name, p in model.named_parameters():
        whole = grads[name]
        p.grad = (
            distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
            if isinstance(p, DTensor)
            else whole.clone()
        )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole, by name."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
