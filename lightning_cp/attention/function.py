"""The one autograd Function: Ulysses around the ring."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lightning_cp.attention.keep import Stash
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.ring import ring_backward, ring_forward
from lightning_cp.attention.ulysses import (
    kv_gradients_to_tokens,
    q_to_heads,
    q_to_tokens,
    to_heads,
)


class ContextParallelAttention(torch.autograd.Function):
    """Exact attention over a sequence that U x R ranks hold.

    L local tokens, T = U*L tokens of a ring rank, H/K query and K/V heads, h = H/U local query heads,
    k the local K/V heads they use; hops h = 1 .. R-1 exchange only keys that some tile touches.

    ========  =========================================  ==============================================
    pass      tensors                                    collective
    ========  =========================================  ==============================================
    forward   q [B,L,H,D] -> [T,B,h,D]                   all-to-all over ulysses
              k, v [B,L,K,D] -> kv [T,B,2k,D]            all-to-all over ulysses
              kv of each hop                             send to r+h, receive from r-h over ring
              out [T,B,h,D] -> [B,L,H,D]                 all-to-all over ulysses
    backward  dout [B,L,H,D] -> [T,B,h,D]                all-to-all over ulysses
              kv of each hop                             send to r+h, receive from r-h over ring
              dkv of each hop, float32 or float64        send to r-h, receive from r+h over ring
              dq [T,B,h,D] -> [B,L,H,D]                  all-to-all over ulysses
              dkv [T,B,2k,D] -> dk, dv [B,L,K,D]         all-to-all over ulysses, summed where shared
    ========  =========================================  ==============================================

    lse [B, h, T] is returned without gradient. With a replaying stash, forward computes and
    communicates nothing: out and lse come from the stash, and q, kv and out are exchanged in backward
    (a recording one drops what it saves, so that exchanging them again costs no memory).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BLHD: torch.Tensor,
        k_BLKD: torch.Tensor,
        v_BLKD: torch.Tensor,
        plan: AttentionPlan,
        stash: Stash | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.plan = plan
        ctx.exchanged = stash is None
        if stash is not None and stash.replaying:
            out_BLHD, lse = stash.replay()
        else:
            q, kv = to_heads(q_BLHD, k_BLKD, v_BLKD, plan)
            out, lse = ring_forward(q, kv, plan)
            out_BLHD = q_to_tokens(out, plan)
            if stash is None:
                ctx.save_for_backward(q, kv, out, lse)
            else:
                stash.record(out_BLHD, lse)
        if stash is not None:  # a recomputation must save what the forward saved
            ctx.save_for_backward(q_BLHD, k_BLKD, v_BLKD, out_BLHD, lse)
        ctx.mark_non_differentiable(lse)
        return out_BLHD, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BLHD: torch.Tensor, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        plan: AttentionPlan = ctx.plan
        if ctx.exchanged:
            q, kv, out, lse = ctx.saved_tensors
        else:
            q_BLHD, k_BLKD, v_BLKD, out_BLHD, lse = ctx.saved_tensors
            q, kv = to_heads(q_BLHD, k_BLKD, v_BLKD, plan)
            out = q_to_heads(out_BLHD, plan)
        dtype = q.dtype
        dq, dkv = ring_backward(q_to_heads(dout_BLHD, plan), q, kv, out, lse, plan)
        dq_BLHD = q_to_tokens(dq.to(dtype), plan)
        dk_BLKD, dv_BLKD = kv_gradients_to_tokens(dkv, plan, dtype)
        return dq_BLHD, dk_BLKD, dv_BLKD, None, None
