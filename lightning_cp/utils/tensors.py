"""Functions of tensors with the types that PyTorch's own annotations leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

to_list: Callable[[torch.Tensor], list[Any]] = torch.Tensor.tolist
"""Return the values as nested lists; waits for the device."""


def to_device(x: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return the tensor on a device (``None``: where it is); the host does not wait for a copy to a GPU."""
    if device is None or x.device == device:
        return x
    from_host = device.type == "cuda" and x.device.type == "cpu"
    if from_host and x.layout is torch.strided and not x.is_nested:
        x = x.pin_memory()  # pageable memory would make the host wait
    return x.to(device, non_blocking=from_host)


vector_norm: Callable[..., torch.Tensor] = torch.linalg.vector_norm
