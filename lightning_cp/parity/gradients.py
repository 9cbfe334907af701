"""Gradients of two passes, compared over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_cp.comm.reduce import all_sum
from lightning_cp.mesh import ContextParallelMesh, Flat
from lightning_cp.parity.passes import Pass
from lightning_cp.parity.sums import largest, ratio

FLOOR = 1e-3
"""Of a gradient's size, over that of an average parameter: smaller ones are compared with this."""


@dataclass(frozen=True)
class GradientErrors:
    """Of all parameters, the same on every rank."""

    by_name: dict[str, float]
    """Relative."""
    factor: float
    """What one process's are multiplied by, at best."""
    residual: float
    """What is left then, relative."""


def gradient_errors(alone: Pass, parallel: Pass, mesh: ContextParallelMesh) -> GradientErrors:
    """Sums over ranks count a replicated gradient several times, in numerator and denominator alike."""
    names = sorted(alone.gradients.keys() | parallel.gradients.keys())
    unit = largest(max((_size(x) for x in alone.gradients.values()), default=0.0), mesh) or 1.0
    sums = torch.zeros(len(names), 5, dtype=torch.float64)
    for at, name in enumerate(names):
        sums[at] = _sums(alone.gradients.get(name), parallel.gradients.get(name), unit)
    found = all_sum(sums, mesh.control_group(Flat.LOSS))
    difference, reference, own, product, count = found.unbind(1)
    mean = float(reference.sum() / count.sum().clamp(min=1))
    floors = (FLOOR**2) * mean * count
    by_name = {
        name: ratio(float(difference[at]), max(float(reference[at]), float(floors[at])))
        for at, name in enumerate(names)
    }
    whole = float(reference.sum())
    factor = float(product.sum()) / whole if whole else float("nan")
    left = float(own.sum()) - 2 * factor * float(product.sum()) + factor**2 * whole
    return GradientErrors(by_name, factor, ratio(max(left, 0.0), whole * factor**2))


def _size(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _sums(alone: torch.Tensor | None, parallel: torch.Tensor | None, unit: float) -> torch.Tensor:
    """|p - a|^2, |a|^2, |p|^2, a p, and how many numbers; a gradient that is not there is zeros.

    In squares of ``unit``, the largest number of all, so that none of them overflows.
    """
    given = alone if alone is not None else parallel
    assert given is not None
    a = torch.zeros_like(given).double() if alone is None else alone.double() / unit
    p = torch.zeros_like(given).double() if parallel is None else parallel.double() / unit
    return torch.stack(
        [
            (p - a).square().sum(),
            a.square().sum(),
            p.square().sum(),
            (a * p).sum(),
            a.new_tensor(a.numel()),
        ]
    ).cpu()
