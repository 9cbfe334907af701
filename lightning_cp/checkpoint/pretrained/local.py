"""The part of a parameter that this rank holds, for any placements.

A DTensor's placements compose from left to right, and what they leave of a dimension need not be one piece
(``_StridedShard``: FSDP over tensor parallelism on one dimension). So we have PyTorch shard the numbers of
the rows themselves, the same way, and look at which ones arrive here. Nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_cp.errors import ConfigError

Runs = tuple[tuple[int, int], ...]
"""Pieces of a dimension, as (first global index, length), in local order."""


@dataclass
class LocalParts:
    """Pieces of every dimension of parameters, remembered by mesh and placements."""

    _known: dict[tuple[Any, ...], Runs] = field(default_factory=dict)

    def of(self, name: str, x: torch.Tensor) -> tuple[Runs, ...]:
        """For every dimension of ``x`` the pieces that this rank has.

        Args:
            name: of the parameter, for the error.
            x: a parameter or buffer; a plain one is held whole. It may be on the meta device.

        Raises:
            ConfigError: a partial sum, which nothing can be loaded into.
        """
        if not isinstance(x, DTensor):
            return tuple(((0, size),) for size in x.shape)
        if any(placement.is_partial() for placement in x.placements):
            raise ConfigError(
                f"{name} has placements {x.placements}: a partial sum over ranks cannot be loaded. Shard "
                "or replicate it first."
            )
        runs = tuple(self._of_dim(x, dim) for dim in range(x.ndim))
        held = tuple(sum(length for _, length in pieces) for pieces in runs)
        local = tuple(x.to_local().shape) if x.numel() else held
        if held != local:
            raise ConfigError(
                f"{name} of shape {tuple(x.shape)} with placements {x.placements} has {local} here, where "
                f"sharding its numbers gives {held}. Shard it in equal parts."
            )
        return runs

    def _of_dim(self, x: DTensor, dim: int) -> Runs:
        kept = tuple(p if getattr(p, "dim", None) == dim else Replicate() for p in x.placements)
        key = (x.device_mesh, kept, x.shape[dim])
        if key not in self._known:
            self._known[key] = _runs(x, kept, x.shape[dim])
        return self._known[key]


def _runs(x: DTensor, placements: tuple[Any, ...], size: int) -> Runs:
    if all(isinstance(p, Replicate) for p in placements):
        return ((0, size),)
    # Sharded along dimension 0 of a vector of numbers, whichever dimension it was.
    along = [p if isinstance(p, Replicate) else _along_first(p) for p in placements]
    numbers = torch.arange(size, device=x.device_mesh.device_type)
    local = distribute_tensor(numbers, x.device_mesh, along, src_data_rank=None).to_local().cpu()
    if not local.numel():
        return ()
    breaks = (torch.diff(local) != 1).nonzero().flatten() + 1
    pieces = torch.tensor_split(local, breaks.tolist())
    return tuple((int(piece[0]), len(piece)) for piece in pieces)


def _along_first(placement: Any) -> Any:
    """The same way of sharding, of dimension 0."""
    if placement.dim == 0:
        return placement
    if hasattr(placement, "split_factor"):
        return type(placement)(0, split_factor=placement.split_factor)
    return type(placement)(0)
