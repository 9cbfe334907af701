"""Attention sinks: one logit per query head that takes part in the softmax and has no value.

A sink is an additional key with value 0, which every query with keys sees. So it needs no kernel:
after the last merge ``lse' = logaddexp(lse, sink)`` and ``out' = out exp(lse - lse')``. Backward of the
tiles is exact with the merged ``out'`` and ``lse'`` as it is, and by the softmax's derivative
``dsink = -sum exp(sink - lse') rowsum(dout out')`` over the queries of a head
(gpt-oss; Xiao et al. 2023, arXiv 2309.17453).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_cp.errors import ShapeError
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.layout import HeadSplit

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TOKENS_AT_ONCE = 4096
"""Bounds the temporaries of the gradient."""


def check_sinks(sinks_H: torch.Tensor, q_BLHD: torch.Tensor) -> None:
    """Check that there is one sink per query head, on the queries' device.

    Raises:
        ShapeError: naming both.
    """
    fits = sinks_H.shape == (q_BLHD.shape[2],) and sinks_H.dtype in _DTYPES
    if not fits or sinks_H.device != q_BLHD.device:
        raise ShapeError(
            f"sinks must be one floating-point logit per query head, [{q_BLHD.shape[2]}] on "
            f"{q_BLHD.device} for q {tuple(q_BLHD.shape)}, got {tuple(sinks_H.shape)} {sinks_H.dtype} on "
            f"{sinks_H.device}. "
            "Convert them with sinks.to(q.device), and give one for each head of q."
        )


class AttentionResult(NamedTuple):
    """Attention of some queries over all keys, sinks included."""

    out: torch.Tensor
    """[B, L, h, D] in the inputs' dtype."""
    lse: torch.Tensor
    """[B, h, L] in the accumulation dtype."""
    max_logits: torch.Tensor | None
    """float32 [B, h, L], the largest score of each query without sinks; if requested."""


def finish_attention(
    state: Accumulator, dtype: torch.dtype, sinks_H: torch.Tensor | None, *, max_logits: bool
) -> AttentionResult:
    """Return the result of all tiles, with the sinks [h] of the state's heads, rounded to ``dtype``."""
    out, lse = state.result(dtype if sinks_H is None else state.dtype)
    if sinks_H is not None:
        out, lse = add_sinks(out, lse, sinks_H)
    return AttentionResult(out.to(dtype), lse, state.max_logits if max_logits else None)


def add_sinks(
    out_BLHD: torch.Tensor, lse_BHL: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``out', lse'`` of merged ``out, lse`` in the accumulation dtype; changes ``out`` in place.

    Args:
        out_BLHD: [B, L, h, D].
        lse_BHL: [B, h, L], -inf for a query without keys (padding), which sees no sink either.
        sinks_H: the sinks [h] of these heads.
    """
    sinks = sinks_H.to(lse_BHL.dtype).unsqueeze(-1)
    whole = torch.logaddexp(lse_BHL, sinks).masked_fill(lse_BHL == -torch.inf, -torch.inf)
    weight = torch.exp(lse_BHL - whole.masked_fill(whole == -torch.inf, 0.0))
    return out_BLHD.mul_(weight.transpose(1, 2).unsqueeze(-1)), whole


def sink_gradients(
    dout_TBHD: torch.Tensor,
    out_TBHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    sinks_H: torch.Tensor,
    heads: HeadSplit,
    ulysses_rank: int,
) -> torch.Tensor:
    """Return this rank's share of the gradient, [H] in the sinks' dtype: of its queries and heads; else 0.

    Args:
        dout_TBHD: [T, B, h, D].
        out_TBHD: ``out'`` like it.
        lse_BHT: ``lse'`` [B, h, T] in the accumulation dtype.
        sinks_H: all sinks [H].
        heads: the split of heads over Ulysses ranks.
        ulysses_rank: the owner of these heads.
    """
    own = slice(*heads.q_range(ulysses_rank))
    dtype = lse_BHT.dtype
    sinks = sinks_H[own].to(dtype).unsqueeze(-1)
    total = torch.zeros_like(sinks_H, dtype=dtype)
    parts = (
        torch.split(dout_TBHD, _TOKENS_AT_ONCE),
        torch.split(out_TBHD, _TOKENS_AT_ONCE),
        torch.split(lse_BHT, _TOKENS_AT_ONCE, dim=2),
    )
    for dout, out, lse in zip(*parts, strict=True):
        blind = lse == -torch.inf  # padding, whose dout may be anything
        weight = torch.exp(sinks - lse.masked_fill(blind, torch.inf))
        share_BHT = (dout.to(dtype) * out.to(dtype)).sum(-1).permute(1, 2, 0)
        total[own] -= (weight * share_BHT.masked_fill(blind, 0.0)).sum((0, 2))
    return total.to(sinks_H.dtype)
