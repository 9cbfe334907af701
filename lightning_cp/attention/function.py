"""The autograd Function of context-parallel attention, Ulysses around ring or all-gather, and its callers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lightning_cp.attention.all_gather import gather_backward, gather_forward
from lightning_cp.attention.checkpointing import Stash, current_stash
from lightning_cp.attention.keys import Keys
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.ring import ring_backward, ring_forward
from lightning_cp.attention.ring_flash_attn import ring_flash_attn_backward, ring_flash_attn_forward
from lightning_cp.attention.sinks import sink_gradients
from lightning_cp.attention.ulysses import GradientsToTokens, q_to_heads, q_to_tokens, to_heads

FORWARD = {
    "ring": ring_forward,
    "rotation": ring_forward,
    "all_gather": gather_forward,
    "ring_flash_attn": ring_flash_attn_forward,
}
BACKWARD = {
    "ring": ring_backward,
    "rotation": ring_backward,
    "all_gather": gather_backward,
    "ring_flash_attn": ring_flash_attn_backward,
}
"""Implementations by exchange."""


class ContextParallelAttention(torch.autograd.Function):
    """Exact attention over a sequence that is sharded over U x R ranks.

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
              dkv [T,B,2k,D] -> dk, dv [B,L,K,D]         with dq; separate if summed in a wider dtype
    ========  =========================================  ==============================================

    With ``exchange="rotation"`` hops send to r+1 and receive from r-1, and dkv of a hop include the previous
    ranks' sums. With ``key_gradients="compute"`` dkv travel in the inputs' dtype. With
    ``exchange="all_gather"`` the three lines of hops are, for some K/V heads at a time:

    ========  =========================================  ==============================================
    forward   kv [T,B,2k,D] -> [R*T,B,2k,D]              all-gather over ring
    backward  kv [T,B,2k,D] -> [R*T,B,2k,D]              all-gather over ring
              dkv [R*T,B,2k,D] -> [T,B,2k,D], wide       reduce-scatter over ring
    ========  =========================================  ==============================================

    lse [B, h, T], and the largest scores like it if the plan requests them (else None), have no gradient.
    Sinks [H] are added to the merged out and lse, so that stored and saved results include them. With a
    replaying stash, forward computes and communicates nothing: out and lse come from the stash (None for the
    largest scores), and q, kv and out are exchanged in backward. A region that records saves local tensors,
    which the checkpoint drops, so this exchange costs no memory.
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
        ctx.mark_non_differentiable(*[x for x in (lse, peak) if x is not None])
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
        # From here on only these names refer to them, unless the graph is retained.
        ctx.maybe_clear_saved_tensors()
        dtype = q.dtype
        dout = q_to_heads(dout_BLHD, plan)
        gradients = [*BACKWARD[plan.exchange.name](dout, q, keys, out, lse, plan)]
        for_sinks = (dout, out, lse, sinks) if ctx.needs_input_grad[3] else None
        # Free everything else before the gradients travel; they are freed once they are packed.
        del dout, q, keys, out, lse, sinks
        pending = GradientsToTokens(gradients, plan, dtype)
        dsinks: torch.Tensor | None = None
        if for_sinks is not None:
            dsinks = sink_gradients(*for_sinks, plan.heads, plan.ulysses_rank)
            del for_sinks
        return *pending.wait(), dsinks, None, None


def attend(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    plan: AttentionPlan,
    *,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Execute a plan that the ranks have already agreed on (the strategy does so once per batch).

    Returns:
        ``out``; or a tuple of it and the requested ones of the lse and the largest scores.
    """
    stash = current_stash()
    out, lse, peak = _apply(q_BLHD, k_BLKD, v_BLKD, plan, stash)
    if not (return_lse or plan.scores.max_logits):
        return out
    wanted = ((lse, return_lse), (peak, plan.scores.max_logits))
    return out, *[_values_to_tokens(x, plan, stash) for x, asked in wanted if asked]


def attend_with_max_logits(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Execute a plan whose kernel computes the largest scores, and reduce these to one per head.

    Returns:
        ``out``; and the largest score of each head as from ``largest_scores``, or ``None`` for a replayed
        call, whose forward returned them.
    """
    out, _, peak = _apply(q_BLHD, k_BLKD, v_BLKD, plan, current_stash())
    return out, None if peak is None else _max_of_heads(peak, plan)


@torch.no_grad()
def largest_scores(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Compute the largest score of each query head over this rank's queries by a forward pass without graph.

    Returns:
        float32 [H]; -inf for the heads of other Ulysses ranks.
    """
    with torch.autocast(q_BLHD.device.type, enabled=False):
        q, keys = to_heads(-q_BLHD if plan.negative else q_BLHD, k_BLKD, v_BLKD, plan)
        peak = FORWARD[plan.exchange.name](q, keys, plan).max_logits
    assert peak is not None
    return _max_of_heads(peak, plan)


def _max_of_heads(peak_BHT: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Reduce [B, h, T] of this Ulysses rank's heads to float32 [H] of all query heads."""
    first, last = plan.heads.q_range(plan.ulysses_rank)
    largest = peak_BHT.new_full((plan.heads.num_heads,), -torch.inf, dtype=torch.float32)
    largest[first:last] = peak_BHT.amax((0, 2))
    return largest


def _apply(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    plan: AttentionPlan,
    stash: Stash | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Apply the Function."""
    q_BLHD = -q_BLHD if plan.negative else q_BLHD
    with torch.autocast(q_BLHD.device.type, enabled=False):  # kernels choose their own precision
        return ContextParallelAttention.apply(  # type: ignore[return-value, misc]
            q_BLHD, k_BLKD, v_BLKD, plan.sinks, plan, stash
        )


def cast_as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tensors as autocast casts the inputs of PyTorch's own attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _values_to_tokens(
    x_BHT: torch.Tensor | None, plan: AttentionPlan, stash: Stash | None
) -> torch.Tensor:
    """Exchange one value per query and head: [B, h, T] of this rank's heads -> [B, H, L] of its tokens."""
    if stash is not None and stash.replaying:
        return stash.replay()[0]
    assert x_BHT is not None
    x_BHL = q_to_tokens(x_BHT.permute(2, 0, 1).unsqueeze(-1), plan).squeeze(-1).transpose(1, 2)
    if stash is not None:
        stash.record(x_BHL)
    return x_BHL
