"""The one autograd Function: Ulysses around the ring or the all-gather."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lightning_cp.attention.all_gather import gather_backward, gather_forward
from lightning_cp.attention.keep import Stash
from lightning_cp.attention.keys import Keys
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.ring import ring_backward, ring_forward
from lightning_cp.attention.ring_flash_attn import ring_flash_attn_backward, ring_flash_attn_forward
from lightning_cp.attention.sinks import sink_gradients
from lightning_cp.attention.ulysses import (
    GradientsToTokens,
    q_to_heads,
    q_to_tokens,
    to_heads,
)

FORWARD = {
    "ring": ring_forward,
    "all_gather": gather_forward,
    "ring_flash_attn": ring_flash_attn_forward,
}
BACKWARD = {
    "ring": ring_backward,
    "all_gather": gather_backward,
    "ring_flash_attn": ring_flash_attn_backward,
}
"""By exchange."""


class ContextParallelAttention(torch.autograd.Function):
    """Exact attention over a sequence that U x R ranks hold.

    L local tokens, T = U*L tokens of a ring rank, H/K query and K/V heads, h = H/U local query heads,
    k the local K/V heads they use; hops h = 1 .. R-1 exchange only keys that some tile touches.

    ========  =========================================  ==============================================
    pass      tensors                                    collective
    ========  =========================================  ==============================================
    forward   q [B,L,H,D] -> [T,B,h,D]                   all-to-all over ulysses
              k, v [B,L,K,D] -> kv [T,B,2k,D]            another, or with q if there is no ring
              kv of each hop                             send to r+h, receive from r-h over ring
              out [T,B,h,D] -> [B,L,H,D]                 all-to-all over ulysses
    backward  dout [B,L,H,D] -> [T,B,h,D]                all-to-all over ulysses
              kv of each hop                             send to r+h, receive from r-h over ring
              dkv of each hop, float32 or float64        send to r-h, receive from r+h over ring
              dq [T,B,h,D] -> [B,L,H,D]                  all-to-all over ulysses
              dkv [T,B,2k,D] -> dk, dv [B,L,K,D]         with dq; alone if it is summed in a wider dtype
    ========  =========================================  ==============================================

    With ``exchange="all_gather"`` the three lines of hops are, for some K/V heads at a time:

    ========  =========================================  ==============================================
    forward   kv [T,B,2k,D] -> [R*T,B,2k,D]              all-gather over ring
    backward  kv [T,B,2k,D] -> [R*T,B,2k,D]              all-gather over ring
              dkv [R*T,B,2k,D] -> [T,B,2k,D], wide       reduce-scatter over ring
    ========  =========================================  ==============================================

    lse [B, h, T], and the largest scores like it if the plan wants them (else None), are returned without
    gradient. Sinks [H] are added to the merged out and lse, so that what is kept and saved has them. With
    a replaying stash, forward computes and communicates nothing: out and lse come from the stash (None for
    the largest scores), and q, kv and out are exchanged in backward (a recording one drops what it saves,
    so that exchanging them again costs no memory).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BLHD: torch.Tensor,
        k_BLKD: torch.Tensor,
        v_BLKD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        plan: AttentionPlan,
        stash: Stash | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        ctx.plan = plan
        ctx.exchanged = stash is None
        peak: torch.Tensor | None = None
        if stash is not None and stash.replaying:
            out_BLHD, lse = stash.replay()
        else:
            q, keys = to_heads(q_BLHD, k_BLKD, v_BLKD, plan)
            out, lse, peak = FORWARD[plan.exchange.name](q, keys, plan)
            out_BLHD = q_to_tokens(out, plan)
            if stash is None:
                ctx.save_for_backward(q, out, lse, sinks_H, *keys.tensors)
            else:
                stash.record(out_BLHD, lse)
        if stash is not None:  # a recomputation must save what the forward saved
            ctx.save_for_backward(q_BLHD, out_BLHD, lse, sinks_H, k_BLKD, v_BLKD)
        ctx.mark_non_differentiable(*(x for x in (lse, peak) if x is not None))
        return out_BLHD, lse, peak

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BLHD: torch.Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        plan: AttentionPlan = ctx.plan
        q, out, lse, sinks, *kv = ctx.saved_tensors
        keys = Keys(tuple(kv), q.shape[3])
        if not ctx.exchanged:
            q, keys = to_heads(q, kv[0], kv[1], plan)
            out = q_to_heads(out, plan)
        kv.clear()
        # From here on nothing but these names holds them, unless the graph is kept.
        ctx.maybe_clear_saved_tensors()
        dtype = q.dtype
        dout = q_to_heads(dout_BLHD, plan)
        gradients = [*BACKWARD[plan.exchange.name](dout, q, keys, out, lse, plan)]
        for_sinks = (dout, out, lse, sinks) if ctx.needs_input_grad[3] else None
        # All that is not needed is gone while the gradients travel; they are themselves once they are packed.
        del dout, q, keys, out, lse, sinks
        pending = GradientsToTokens(gradients, plan, dtype)
        dsinks: torch.Tensor | None = None
        if for_sinks is not None:
            dsinks = sink_gradients(*for_sinks, plan.heads, plan.ulysses_rank)
            del for_sinks
        return *pending.wait(), dsinks, None, None
