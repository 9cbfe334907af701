"""The same model, rounded otherwise: how far rounding alone moves what it computes.

What every innermost module puts out is moved by one unit in the last place, up, down or not at all. What a
model chooses (experts), and gradients that are zero but for rounding (biases of keys), are moved far by that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_cp.module_hooks import add_hook


@contextmanager
def rounded_otherwise(model: nn.Module, draw: int | None) -> Iterator[None]:
    """Within, what modules put out is rounded otherwise; ``draw`` says how, ``None`` not at all."""
    if draw is None:
        yield
        return
    numbers = torch.Generator().manual_seed(draw)

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        step = torch.randint(-1, 2, output.shape, generator=numbers, dtype=torch.int8)
        size = torch.finfo(output.dtype).eps
        return output * (1 + size * step.to(output.device, output.dtype))

    innermost = [module for module in model.modules() if next(module.children(), None) is None]
    hooks = [add_hook(module.register_forward_hook, move) for module in innermost]
    try:
        yield
    finally:
        for remove in hooks:
            remove()
