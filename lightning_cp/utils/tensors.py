"""Functions of tensors with the types that PyTorch's own annotations leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

to_list: Callable[[torch.Tensor], list[Any]] = torch.Tensor.tolist
"""Return the values as nested lists; waits for the device."""

vector_norm: Callable[..., torch.Tensor] = torch.linalg.vector_norm
