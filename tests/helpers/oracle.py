"""Dense attention in float64: what every kernel and every distribution must reproduce.

Scores of all S x S pairs are masked and normalised in one piece, and differentiated by autograd:
no tiles, no online softmax, no recomputation, nothing in common with the package.

Shapes: ``q_BSHD`` [batch, tokens, heads, head dim]; ``k_BSKD``, ``v_BSKD`` with K heads, each used
by H/K neighbouring query heads; ``lse_BHS`` natural logarithm, -inf (and out 0) where no key is
seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

Intervals = Sequence[tuple[int, int]]
"""(start, end) of the documents of one row; what none of them covers is padding."""


@dataclass(frozen=True)
class Attention:
    """Results of one attention call in float64; gradients are those of ``(out * dout).sum()``.

    ``dsinks`` [H] where there are sinks; ``max_logits`` [B, H, S], the largest score of each query,
    where it was asked for.
    """

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None = None
    max_logits: torch.Tensor | None = None

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of each result that there is."""
        every = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, x) for name, x in every if x is not None]


@dataclass(frozen=True, eq=False)
class Scores:
    """What is done to scaled scores: capped, then less ``slope * distance``; a sink is one more.

    Args:
        softcap: where ``softcap * tanh(score / softcap)`` levels off; 0 is nowhere.
        alibi_slopes: ``[H]`` or ``[B, H]``.
        sinks: ``[H]``, logits of a key that every query with keys sees, and that has no value.
        max_logits: whether the largest score of each query is wanted, sinks aside.
    """

    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    max_logits: bool = False


PLAIN = Scores()


def visible_pairs(
    length: int,
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    documents: Sequence[Intervals] | None = None,
) -> torch.Tensor:
    """Bool ``[rows, length, length]``: whether query i (dim 1) sees key j (dim 2).

    Args:
        length: tokens of the sequence.
        causal: no key ahead of its query.
        window: (left, right) distances still seen; -1 is unbounded.
        documents: intervals per row that see only themselves; ``None`` is one of everything.
    """
    ahead = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    left, right = window
    seen = torch.ones(length, length, dtype=torch.bool)
    if causal:
        seen &= ahead <= 0
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    rows = [[(0, length)]] if documents is None else documents
    return torch.stack([seen & _same_document(length, row) for row in rows])


def _same_document(length: int, intervals: Intervals) -> torch.Tensor:
    same = torch.zeros(length, length, dtype=torch.bool)
    for start, end in intervals:
        same[start:end, start:end] = True
    return same


def attend(
    q_BSHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    dout_BSHD: torch.Tensor,
    visible: torch.Tensor,
    softmax_scale: float | None = None,
    how: Scores = PLAIN,
) -> Attention:
    """Attention and its gradients, in float64 whatever the dtype of the inputs.

    Args:
        visible: bool ``[rows, S, S]`` as from ``visible_pairs``; one row stands for all.
        softmax_scale: factor of the scores; ``None`` is ``1 / sqrt(head dim)``.
        how: what is done to them then.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q_BSHD, k_BSKD, v_BSKD))
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = _change(scale * torch.einsum("bihd,bjhd->bhij", q, keys), how)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    largest = scores.detach().amax(-1) if how.max_logits else None
    blind = ~visible.any(dim=-1)[:, None, :, None]
    sinks: list[torch.Tensor] = []
    if how.sinks is not None:  # one more column of scores, whose weight meets no value
        sinks = [how.sinks.detach().double().requires_grad_()]
        column = sinks[0].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column.masked_fill(blind, -math.inf)], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    # A row that sees nothing would be 0/0: it is softmaxed over zeros, then weighted with 0.
    weights = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    out = torch.einsum("bhij,bjhd->bihd", weights[..., : keys.shape[1]], values)
    dq, dk, dv, *ds = torch.autograd.grad(out, (q, k, v, *sinks), dout_BSHD.detach().double())
    return Attention(out.detach(), lse.detach(), dq, dk, dv, ds[0] if ds else None, largest)


def _change(scores: torch.Tensor, how: Scores) -> torch.Tensor:
    """Scaled scores [B, H, S, S], capped and biased."""
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if how.alibi_slopes is not None:
        queries, keys = (torch.arange(n, dtype=torch.float64) for n in scores.shape[2:])
        slopes = how.alibi_slopes.double().view(-1, scores.shape[1], 1, 1)
        scores = scores - slopes * (queries[:, None] - keys[None, :]).abs()
    return scores


def attention(
    q_BSHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    dout_BSHD: torch.Tensor,
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    documents: Sequence[Intervals] | None = None,
    softmax_scale: float | None = None,
    how: Scores = PLAIN,
) -> Attention:
    """What one process computes; arguments as in ``visible_pairs`` and ``attend``."""
    visible = visible_pairs(q_BSHD.shape[1], causal=causal, window=window, documents=documents)
    return attend(q_BSHD, k_BSKD, v_BSKD, dout_BSHD, visible, softmax_scale, how)


def void_outputs(
    q_BSHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    dout_BSHD: torch.Tensor,
    positions: Sequence[torch.Tensor],
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    documents: Sequence[Intervals] | None = None,
    softmax_scale: float | None = None,
    how: Scores = PLAIN,
) -> dict[str, Attention]:
    """Results that a test must not accept, by what is wrong with them.

    ``zero``: nothing was computed. ``local`` (for two ranks and more): nothing was communicated,
    each rank attended to its own tokens only.

    Args:
        positions: global positions of each rank's tokens; those from S on are padding.
    """
    length = q_BSHD.shape[1]
    visible = visible_pairs(length, causal=causal, window=window, documents=documents)
    per_query = q_BSHD.new_zeros(q_BSHD.shape[0], q_BSHD.shape[2], length).double()
    none = Attention(
        dout_BSHD.double() * 0,
        per_query,
        q_BSHD.double() * 0,
        k_BSKD.double() * 0,
        v_BSKD.double() * 0,
        None if how.sinks is None else how.sinks.double() * 0,
        per_query if how.max_logits else None,
    )
    if len(positions) < 2:
        return {"zero": none}
    rank_of = torch.full((length,), -1)
    for rank, held in enumerate(positions):
        rank_of[held[held < length]] = rank
    own = rank_of[:, None] == rank_of[None, :]
    local = attend(q_BSHD, k_BSKD, v_BSKD, dout_BSHD, visible & own, softmax_scale, how)
    return {"zero": none, "local": local}


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities do not differ, NaN differs infinitely."""
    difference = (actual.double() - expected.double()).abs()
    difference = difference.masked_fill(actual.double() == expected.double(), 0.0)
    return difference.nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def assert_not_vacuous(
    expected: Attention,
    voids: Mapping[str, Attention],
    tolerance: float | Mapping[str, float],
    error: Callable[[torch.Tensor, torch.Tensor], float] = max_error,
) -> None:
    """Require that each result would fail its tolerance in each void result.

    Args:
        tolerance: what the test allows, for all results or by name.
        error: how the test measures, as ``error(actual, expected)``.
    """
    for what, void in voids.items():
        for name, wrong in void.items():
            allowed = tolerance[name] if isinstance(tolerance, Mapping) else tolerance
            reached = error(wrong, getattr(expected, name))
            assert reached > allowed, (
                f"this test proves nothing: the {what} output has an error of {reached:.3g} in "
                f"{name}, which the tolerance {allowed:.3g} accepts."
            )
