"""This rank's part of a tensor, without any communication."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_part(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``x``, sharing its memory and not differentiable; all of it if it is no DTensor."""
    with torch.no_grad():  # several times as fast as DTensor.detach
        return x.to_local() if isinstance(x, DTensor) else x.detach()
