"""Swapping a model's attention for the context-parallel one, and undoing it; names are loaded on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_cp.utils.lazy import lazy

if TYPE_CHECKING:
    from lightning_cp.batch.step_state import StepState as StepState
    from lightning_cp.models.handle import SwapHandle as SwapHandle
    from lightning_cp.models.swap import num_heads_of as num_heads_of
    from lightning_cp.models.swap import swap_attention as swap_attention

_HOME = {
    "StepState": "lightning_cp.batch.step_state",
    "SwapHandle": "lightning_cp.models.handle",
    "num_heads_of": "lightning_cp.models.swap",
    "swap_attention": "lightning_cp.models.swap",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy(__name__, _HOME)
