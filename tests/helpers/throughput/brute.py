"""The same counts from dense masks and from shapes, with nothing of the package."""

from __future__ import annotations

import torch


def dense_pairs(ids: torch.Tensor, causal: bool, window: tuple[int, int] = (-1, -1)) -> int:
    """Visible pairs of rows [B, S] whose tokens have document ids; -1 is padding."""
    length = ids.shape[1]
    there = torch.arange(length)
    ahead = there[None, :] - there[:, None]  # key minus query
    seen = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    if causal:
        seen &= ahead <= 0
    if window[0] >= 0:
        seen &= -ahead <= window[0]
    if window[1] >= 0:
        seen &= ahead <= window[1]
    return int(seen.sum())


def attention_flops(pairs: int, heads: int, dim: int) -> int:
    """Forward 4 D H, and backward twice that."""
    return 12 * heads * dim * pairs
