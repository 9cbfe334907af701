"""Executing a plan that ranks have agreed on."""

from __future__ import annotations

import torch

from lightning_cp.attention.function import FORWARD, ContextParallelAttention
from lightning_cp.attention.keep import Stash, current_stash
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.attention.ulysses import q_to_tokens, to_heads


def attend(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    plan: AttentionPlan,
    *,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Execute a plan that the ranks have agreed on already (once per batch, by the strategy).

    Returns:
        ``out``; with more to return, a tuple of it, the lse, and the plan's largest scores.
    """
    stash = current_stash()
    out, lse, peak = _attended(q_BLHD, k_BLKD, v_BLKD, plan, stash)
    wanted = ((lse, return_lse), (peak, plan.scores.max_logits))
    more = [_to_tokens(x, plan, stash) for x, asked in wanted if asked]
    return (out, *more) if more else out


def attend_and_note(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Execute a plan whose kernel gives the largest scores, of which no token is told.

    Returns:
        ``out``; and the largest score of each head, as ``largest_scores`` has it, ``None`` for a call that is
        replayed: its forward had them.
    """
    out, _, peak = _attended(q_BLHD, k_BLKD, v_BLKD, plan, current_stash())
    return out, None if peak is None else _of_heads(peak, plan)


@torch.no_grad()
def largest_scores(
    q_BLHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """A forward pass for nothing but the largest score of each query head over this rank's queries.

    Returns:
        float32 [H]; -inf for the heads of other Ulysses ranks. Nothing is kept for backward.
    """
    with torch.autocast(q_BLHD.device.type, enabled=False):
        q, keys = to_heads(-q_BLHD if plan.negative else q_BLHD, k_BLKD, v_BLKD, plan)
        peak = FORWARD[plan.exchange.name](q, keys, plan).max_logits
    assert peak is not None
    return _of_heads(peak, plan)


def _of_heads(peak_BHT: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """float32 [H] of all query heads, from those [B, h, T] of this Ulysses rank's heads."""
    first, last = plan.heads.q_range(plan.ulysses_rank)
    largest = peak_BHT.new_full((plan.heads.num_heads,), -torch.inf, dtype=torch.float32)
    largest[first:last] = peak_BHT.amax((0, 2))
    return largest


def _attended(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    plan: AttentionPlan,
    stash: Stash | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The outputs of the Function."""
    q_BLHD = -q_BLHD if plan.negative else q_BLHD
    with torch.autocast(q_BLHD.device.type, enabled=False):  # kernels choose their own precision
        return ContextParallelAttention.apply(  # type: ignore[return-value, misc]
            q_BLHD, k_BLKD, v_BLKD, plan.sinks, plan, stash
        )


def _to_tokens(
    x_BHT: torch.Tensor | None, plan: AttentionPlan, stash: Stash | None
) -> torch.Tensor:
    """A number per query and head [B, H, L] of this rank's own tokens, from those [B, h, T] of its heads."""
    if stash is not None and stash.replaying:
        return stash.replay()[0]
    assert x_BHT is not None
    x_BHL = q_to_tokens(x_BHT.permute(2, 0, 1).unsqueeze(-1), plan).squeeze(-1).transpose(1, 2)
    if stash is not None:
        stash.record(x_BHL)
    return x_BHL
