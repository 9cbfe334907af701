"""Ulysses: before attention, tokens are traded for heads; after it, back (arXiv 2309.14509).

Inside, tensors are token-first ([tokens of the ring rank, batch, heads, head dim]): the tokens of
the Ulysses ranks, in order, are the sorted tokens of their ring rank, and a range of them is
contiguous memory that the ring sends as it is. K and V travel together, one K/V head after the other
(K of head 0, V of head 0, K of head 1, ...), so that a range of K/V heads is one slice.
"""

from __future__ import annotations

import torch

from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.comm.all_to_all import gather_heads, scatter_heads
from lightning_cp.mesh import Axis


def pair(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """K and V ``[..., K/V heads, D]`` as one tensor ``[..., 2 * K/V heads, D]``."""
    return torch.stack([k, v], dim=3).flatten(2, 3)


def unpair(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V in what :func:`pair` made."""
    return kv[:, :, 0::2], kv[:, :, 1::2]


def to_heads(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of this ring rank, for this rank's heads.

    Returns:
        ``q`` [T, B, h, D] and the pair ``kv`` [T, B, 2k, D], T being the ring rank's tokens.
    """
    if plan.heads.ulysses_size == 1:
        return q_BLHD.transpose(0, 1), pair(k_BLKD.transpose(0, 1), v_BLKD.transpose(0, 1))
    group, rank = plan.mesh.group(Axis.ULYSSES), plan.ulysses_rank
    q = scatter_heads(q_BLHD, plan.q_ranges, rank, group)
    kv = scatter_heads(pair(k_BLKD, v_BLKD), plan.paired_kv_ranges, rank, group)
    return q.wait(), kv.wait()


def q_to_heads(x_BLHD: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Something shaped like q: [B, L, H, D] -> [T, B, h, D]."""
    if plan.heads.ulysses_size == 1:
        return x_BLHD.transpose(0, 1)
    group = plan.mesh.group(Axis.ULYSSES)
    return scatter_heads(x_BLHD, plan.q_ranges, plan.ulysses_rank, group).wait()


def q_to_tokens(x_TBHD: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Something shaped like q: [T, B, h, D] -> [B, L, H, D]."""
    if plan.heads.ulysses_size == 1:
        return x_TBHD.transpose(0, 1)
    group, heads = plan.mesh.group(Axis.ULYSSES), plan.heads.num_heads
    return gather_heads(x_TBHD, plan.q_ranges, plan.ulysses_rank, heads, group)


def kv_gradients_to_tokens(
    dkv_TBKD: torch.Tensor, plan: AttentionPlan, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """dK and dV [B, L, K, D] from the pair [T, B, 2k, D], summed over the ranks that share a head.

    Where heads are shared the partial sums travel in the accumulation dtype, and are rounded once.
    """
    if plan.heads.ulysses_size > 1:
        wire = dkv_TBKD if plan.heads.shares_kv else dkv_TBKD.to(dtype)
        group, heads = plan.mesh.group(Axis.ULYSSES), 2 * plan.heads.num_kv_heads
        dkv = gather_heads(wire, plan.paired_kv_ranges, plan.ulysses_rank, heads, group)
    else:
        dkv = dkv_TBKD.transpose(0, 1)
    dk, dv = unpair(dkv.to(dtype))
    return dk, dv
