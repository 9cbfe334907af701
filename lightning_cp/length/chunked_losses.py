"""Cross-entropy of a linear head with its logits made twice, chunk by chunk: in forward, and in backward.

Forward keeps one number per token, the log of the sum of exponentials. Sums over chunks are float32 at
least, so that nothing is rounded more often than with all logits at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

Change = Callable[[torch.Tensor], torch.Tensor]
"""What is done to logits [n, V], each number by itself."""


class ChunkedLosses(torch.autograd.Function):
    """Over N tokens, C features and a vocabulary of V, in chunks of n tokens.

    | pass | input | output | held at once | collectives |
    |---|---|---|---|---|
    | forward | hidden [N, C], weight [V, C], bias [V], target [N] | losses [N] | logits [n, V] | none |
    | backward | d losses [N] | d hidden, d weight, d bias | logits [n, V], sums [V, C] | none |
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        change: Change | None,
        dtype: torch.dtype,
        chunk_tokens: int,
    ) -> torch.Tensor:
        ctx.change, ctx.dtype, ctx.chunk = change, dtype, chunk_tokens
        lse = hidden.new_empty(len(target), dtype=_sums(dtype))
        losses = torch.empty_like(lse)
        with _no_autocast(hidden):
            head = _Head(weight, bias, dtype)
            for at in _chunks(len(target), chunk_tokens):
                logits = head.logits(hidden[at])
                logits = (logits if change is None else change(logits)).to(lse.dtype)
                lse[at] = logits.logsumexp(-1)
                losses[at] = lse[at] - logits.gather(-1, target[at, None])[:, 0]
                del logits  # before the next are made
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        hidden, weight, bias, target, lse = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (scale,) = gradients
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if needs_bias else None
        with _no_autocast(hidden):
            head = _Head(weight, bias, ctx.dtype)
            for at in _chunks(len(target), ctx.chunk):
                given = hidden[at].to(ctx.dtype)
                logits = head.logits(given)
                d_logits = _d_logits(logits, ctx.change, target[at], lse[at], scale[at])
                del logits
                if d_hidden is not None:
                    d_hidden[at] = d_logits @ head.weight
                if d_weight is not None:
                    _add_product(d_weight, d_logits, given)
                if d_bias is not None:
                    d_bias += d_logits.sum(0, dtype=lse.dtype)
                del d_logits
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 4,
        )


class _Head:
    """Weight [V, C] and bias [V] in the dtype that is computed in."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)
        self._bias = None if bias is None else bias.to(dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] of [n, C]."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self._bias)


def _d_logits(
    logits: torch.Tensor,
    change: Change | None,
    target: torch.Tensor,
    lse: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """(softmax - onehot) of each token, scaled, and through ``change``; [n, V] in the logits' dtype."""
    leaf = logits.requires_grad_(change is not None)
    with torch.set_grad_enabled(change is not None):
        changed = (leaf if change is None else change(leaf)).to(lse.dtype)
    gradient = changed.detach() - lse[:, None]
    gradient.exp_()
    gradient[torch.arange(len(target), device=target.device), target] -= 1
    gradient *= scale[:, None]
    if change is None:
        return gradient.to(logits.dtype)
    return torch.autograd.grad(changed, leaf, gradient)[0]


def _add_product(total: torch.Tensor, d_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """``total += d_logits^T hidden``, summed in the dtype of ``total``."""
    if total.dtype == hidden.dtype:
        total.addmm_(d_logits.t(), hidden)
    else:
        total += d_logits.t() @ hidden


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _no_autocast(x: torch.Tensor) -> Any:
    """Dtypes were chosen already; backward may run with autocast on or off."""
    return torch.autocast(x.device.type, enabled=False)


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))
