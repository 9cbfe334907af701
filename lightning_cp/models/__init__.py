"""Swapping a model's attention for the context-parallel one, and undoing it."""

from lightning_cp.batch.step_state import StepState
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.swap import num_heads_of, swap_attention

__all__ = ["StepState", "SwapHandle", "num_heads_of", "swap_attention"]
