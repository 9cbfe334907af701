"""The values that the ranks of a group have, side by side, and what they make together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_cp.comm.agreement import exchange
from lightning_cp.mesh import ContextParallelMesh, Flat


def side_by_side(
    values: Sequence[torch.Tensor], mesh: ContextParallelMesh, flat: Flat = Flat.CP
) -> list[torch.Tensor]:
    """float64 ``[ranks, *shape]`` for each value: every rank's own, in rank order, equal on all ranks.

    One exchange, on the mesh's device: where a value happens to live may differ between ranks. Every rank
    of the group calls it with as many values, of the same shapes.
    """
    if not values:
        return []
    flatly = [value.detach().to(mesh.device_type, torch.float64).reshape(-1) for value in values]
    table = torch.stack(exchange(torch.cat(flatly), mesh.group(flat)))
    parts = table.split([part.numel() for part in flatly], dim=1)
    return [part.reshape(-1, *value.shape) for part, value in zip(parts, values, strict=True)]


def equal(rows: torch.Tensor) -> torch.Tensor:
    """bool ``[*shape]``: whether all ranks have the same; NaN equals NaN."""
    return ((rows == rows[0]) | (rows.isnan() & rows[0].isnan())).all(0)


def weighted_mean(rows: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """float64 ``[*shape]``: the mean over ranks; exactly their value where all have the same.

    Args:
        rows: ``[ranks, *shape]``.
        shares: each rank's weight; they sum to 1. What a rank of weight 0 has is not looked at, NaN or not.
    """
    mean = torch.zeros_like(rows[0])
    for row, share in zip(rows, shares, strict=True):
        if share:
            mean = mean + share * row
    return torch.where(equal(rows), rows[0], mean)
