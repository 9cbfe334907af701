"""Swapping a model's attention for the context-parallel one, and undoing it."""

from lightning_cp.models.swap import StepState, SwapHandle, num_heads_of, swap_attention

__all__ = ["StepState", "SwapHandle", "num_heads_of", "swap_attention"]
