"""Merging of partial results by one Triton kernel, which reads and writes each tensor once.

The operators of :func:`lightning_cp.kernels.merge.merge` pass over ``out`` twice if the new part has another
dtype, and need five small kernels for the log-sum-exps.
"""

from __future__ import annotations

import torch

from lightning_cp.kernels.triton.launch import (
    by_head,
    device_code,
    is_installed,
    on_device,
    padded_dim,
)

TOKENS = 32
"""Tokens of one head that a program merges."""

Places = tuple[torch.Tensor, torch.Tensor]
"""int64 rows and positions [T] of scattered tokens, each token once."""


def merge_on_gpu(
    out_BLHD: torch.Tensor,
    lse_BHL: torch.Tensor,
    new_out_BLHD: torch.Tensor,
    new_lse_BHL: torch.Tensor,
    at: Places | None = None,
) -> bool:
    """Merge ``new`` into ``out, lse`` in place by one launch; return False if Triton cannot.

    Args:
        out_BLHD: on a GPU.
        lse_BHL: its log-sum-exp.
        new_out_BLHD: of any floating-point dtype.
        new_lse_BHL: its log-sum-exp.
        at: places of the new tokens, which are then [1, T, ...].
    """
    # Neither a fake tensor nor another stand-in for a GPU.
    has_gpu = type(out_BLHD) is torch.Tensor and torch.version.cuda is not None
    fits = out_BLHD.dtype == torch.float32 and out_BLHD.stride(-1) == new_out_BLHD.stride(-1) == 1
    if not (has_gpu and fits and is_installed()):
        return False
    launch_merge(out_BLHD, lse_BHL, new_out_BLHD, new_lse_BHL, at)
    return True


def launch_merge(
    out_BLHD: torch.Tensor,
    lse_BHL: torch.Tensor,
    new_out_BLHD: torch.Tensor,
    new_lse_BHL: torch.Tensor,
    at: Places | None = None,
) -> None:
    """Launch the kernel of :func:`merge_on_gpu`; ``out`` is float32, strides along the head dim are 1."""
    batch, tokens, heads, dim = new_out_BLHD.shape
    if not new_out_BLHD.numel():
        return
    with on_device(out_BLHD.device):
        device_code().merge_results[-(-tokens // TOKENS), heads, batch](
            by_head(out_BLHD),
            by_head(lse_BHL.transpose(1, 2)),
            by_head(new_out_BLHD),
            by_head(new_lse_BHL.transpose(1, 2)),
            *((None, None) if at is None else at),
            tokens,
            IS_SCATTERED=at is not None,
            D=dim,
            BLOCK_D=padded_dim(dim),
            BLOCK=TOKENS,
        )
