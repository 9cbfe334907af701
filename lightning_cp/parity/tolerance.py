"""The distance that two ways of computing the same may have, by the dtype that they compute in.

Errors are relative norms, ``|a - b| / |b|``, of the whole tensor. In exact arithmetic both ways are equal;
what is allowed is rounding, which grows with depth: several times what healthy models show
(``docs/doctor.md``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors."""

    dtype: str
    loss: float
    logits: float
    gradient: float


TOLERANCES = {
    # Models that are float64 have norms, rotary rows and losses in float32 all the same.
    torch.float64: Tolerance("float64", 1e-5, 1e-5, 1e-4),
    torch.float32: Tolerance("float32", 1e-4, 1e-3, 2e-3),
    torch.float16: Tolerance("float16", 5e-3, 2e-2, 5e-2),
    torch.bfloat16: Tolerance("bfloat16", 1e-2, 5e-2, 1e-1),
}


def tolerance_of(dtypes: Iterable[torch.dtype]) -> Tolerance:
    """That of the coarsest dtype.

    Args:
        dtypes: of parameters, of autocast where that is on, and half precision that a step computes in.
    """
    coarsest = max(
        (dtype for dtype in dtypes if dtype.is_floating_point),
        key=lambda dtype: torch.finfo(dtype).eps,
        default=torch.float32,
    )
    return TOLERANCES.get(coarsest, TOLERANCES[torch.bfloat16])


def half_of(dtypes: Iterable[torch.dtype]) -> set[torch.dtype]:
    """Those below float32, whose rounding a float64 model's tolerance does not allow for."""
    limit = torch.finfo(torch.float32).eps
    return {x for x in dtypes if x.is_floating_point and torch.finfo(x).eps > limit}
