"""Numbers of all ranks, and what they are in proportion."""

from __future__ import annotations

import torch

from lightning_cp.comm.reduce import all_max
from lightning_cp.mesh import ContextParallelMesh, Flat


def largest(value: float, mesh: ContextParallelMesh) -> float:
    """Of what all ranks have."""
    own = torch.tensor([value], dtype=torch.float64)
    return float(all_max(own, mesh.control_group(Flat.LOSS)))


def ratio(square: float, of: float) -> float:
    """The root of two sums of squares; infinite where it is no number."""
    if square == 0.0:
        return 0.0
    ratio = (square / of) ** 0.5 if of else float("inf")
    return ratio if ratio == ratio else float("inf")
