"""Cross-entropy of a linear head whose logits exist for one chunk of tokens at a time.

    logits = change(hidden W^T + b),   loss = log sum exp(logits) - logits[target]

``[tokens, vocabulary]`` logits are most of a long sequence's memory: in float32, with a vocabulary of
128,000, half a megabyte a token, and several times that in their backward. Here forward saves one number
per token (the log of the sum), and backward recomputes each chunk's logits. Sums over chunks are float32 at
least, so that nothing is rounded more often than with all logits at once.

Properties of ``torch.nn.functional.linear_cross_entropy`` of PyTorch 2.13 with
``options=LinearCrossEntropyOptions(...)`` (without, it holds the logits), observed on CPU
(``python -m benchmarks.loss``):

- It never holds the logits, with any reduction; it takes a bias, ``ignore_index`` and float64.
- ``mean`` and ``sum`` compute gradients in forward, and hold them until backward. ``none`` computes them in
  backward, from recomputed logits. Bfloat16 inputs give bfloat16: ``mean`` and ``sum`` round the sum once
  per chunk, and ``none`` rounds every token's loss.
- Backward multiplies the incoming gradient by 0 where a target is ignored: an infinite gradient (a mean over
  no target) becomes NaN, and not the exact 0 of ``cross_entropy``.
- It ignores autocast, and does not support changes of logits (caps, scales).

So its ``none`` is used for float32 and float64 without autocast, cap or scale, on PyTorch 2.13 or later,
behind a mask; every other case uses ``ChunkedLosses``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_cp.config import DEFAULT_CHUNK_TOKENS
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.utils.autograd_notes import note_origin

Change = Callable[[torch.Tensor], torch.Tensor]
"""Elementwise change of logits [n, V]."""


class ChunkedLosses(torch.autograd.Function):
    """Losses of N tokens with C features and a vocabulary of V, in chunks of n tokens.

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
            head = _LinearHead(weight, bias, dtype)
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
            head = _LinearHead(weight, bias, ctx.dtype)
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


class _LinearHead:
    """Linear head: weight [V, C] and bias [V] in the compute dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)
        self._bias = None if bias is None else bias.to(dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] of hidden states [n, C]."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self._bias)


def _d_logits(
    logits: torch.Tensor,
    change: Change | None,
    target: torch.Tensor,
    lse: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Return (softmax - onehot) of each token, scaled, through ``change``: [n, V] in the logits' dtype."""
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
    """Compute ``total += d_logits^T hidden``, summed in the dtype of ``total``."""
    if total.dtype == hidden.dtype:
        total.addmm_(d_logits.t(), hidden)
    else:
        total += d_logits.t() @ hidden


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _no_autocast(x: torch.Tensor) -> Any:
    """Disable autocast: dtypes are chosen already, and backward may run with autocast on or off."""
    return torch.autocast(x.device.type, enabled=False)


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def linear_cross_entropy(
    hidden_BLC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_BL: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "none",
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` that holds the logits of at most ``chunk_tokens`` tokens.

    Exact: equal to ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`` up to the order of
    additions, under autocast too. Losses and their sum are float32 (float64 of float64), and so are the sums
    over chunks of the weight's and the bias's gradients.

    Args:
        hidden_BLC: ``[..., C]``, inputs of the head.
        weight_VC: ``[V, C]``, the head's whole weight: call this within the forward of a sharded module.
        bias_V: ``[V]`` or ``None``.
        targets_BL: int64 ``[...]``: the target of each token, already shifted.
        ignore_index: target that is ignored.
        reduction: ``none``, ``sum``, or ``mean`` over the targets that are not ignored (NaN if all are).
        chunk_tokens: tokens whose logits exist at once.
        scale: factor of the logits.
        softcap: scaled logits become ``softcap * tanh(logits / softcap)``; 0: unchanged.

    Returns:
        ``[...]`` losses, 0 for ignored targets; or one number.

    Raises:
        ConfigError: an invalid ``chunk_tokens`` or ``reduction``, or a sharded weight.
        ShapeError: sizes or dtypes that do not fit.
        IndexError: on the CPU, a target that is neither ``ignore_index`` nor in the vocabulary.
    """
    change: Change | None = None
    if scale != 1.0 or softcap:
        change = lambda z: _changed(z, scale, softcap)  # noqa: E731
    return changed_cross_entropy(
        *(hidden_BLC, weight_VC, bias_V, targets_BL, change),
        ignore_index=ignore_index,
        reduction=reduction,
        chunk_tokens=chunk_tokens,
    )


def changed_cross_entropy(
    hidden_BLC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_BL: torch.Tensor,
    change: Change | None,
    *,
    ignore_index: int,
    reduction: str,
    chunk_tokens: int,
) -> torch.Tensor:
    """Compute ``linear_cross_entropy`` with any elementwise change of the logits."""
    check_chunk_tokens("chunk_tokens", chunk_tokens)
    if reduction not in ("none", "sum", "mean"):
        raise ConfigError(
            f"reduction must be one of none, sum, mean, got {reduction!r}. "
            "mean divides by the number of targets."
        )
    _check_shapes(hidden_BLC, weight_VC, bias_V, targets_BL)
    hidden, targets = hidden_BLC.flatten(0, -2), targets_BL.flatten()
    counts = targets != ignore_index
    _check_targets(targets, counts, weight_VC.shape[0])
    if change is None and _pytorch_is_exact(hidden, weight_VC, bias_V):
        losses = _by_pytorch(hidden, weight_VC, bias_V, targets, ignore_index, chunk_tokens)
    else:
        given = (hidden, weight_VC, bias_V, targets.where(counts, 0))
        losses: Any = ChunkedLosses.apply(
            *given, change, compute_dtype(hidden, weight_VC), chunk_tokens
        )
    losses = losses.where(counts, 0)  # its backward gives 0, even for an infinite gradient
    if reduction == "none":
        return losses.view(targets_BL.shape)
    if reduction == "sum":
        return losses.sum()
    count = counts.sum()
    mean = losses.sum() / count
    note_origin(mean, count)
    return mean


def check_chunk_tokens(name: str, value: object) -> None:
    """Check that a value is a number of tokens.

    Raises:
        ConfigError: it is not; names the setting.
    """
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{name} must be a number of tokens, an integer of at least 1, got {value!r}. "
            "Leave it out for the default."
        )


def compute_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the head's product: autocast's, where it is on."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def _changed(z: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    z = z * scale
    return softcap * torch.tanh(z / softcap) if softcap else z


def _check_shapes(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> None:
    if isinstance(weight, DTensor):
        raise ConfigError(
            "linear_cross_entropy was given a sharded weight (a DTensor): each rank holds a part of "
            "it. Call it within the forward of the module that the engine gathers, where weights are "
            "whole."
        )
    fits = hidden.dim() > 1 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or hidden.shape[:-1] != targets.shape or targets.dtype != torch.int64:
        raise ShapeError(
            "linear_cross_entropy needs hidden [..., C], weight [V, C] and int64 targets [...], got "
            f"{list(hidden.shape)}, {list(weight.shape)} and {targets.dtype} {list(targets.shape)}. "
            "Give hidden states before the head, the head's weight, and class numbers."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"the bias must have one number per row of the weight, {weight.shape[0]}, got "
            f"{list(bias.shape)}. Leave it out, or give the bias of the same layer."
        )
    plain = not torch.is_autocast_enabled(hidden.device.type)
    if plain and hidden.dtype != weight.dtype:
        raise ShapeError(
            f"hidden is {hidden.dtype} and the weight {weight.dtype}: outside of autocast they must be "
            "the same."
        )


def _check_targets(targets: torch.Tensor, counts: torch.Tensor, vocabulary: int) -> None:
    if targets.device.type != "cpu":
        return  # reading would wait for the device, whose kernel checks bounds itself
    if bool((counts & ((targets < 0) | (targets >= vocabulary))).any()):
        raise IndexError(f"a target is out of bounds of the vocabulary of {vocabulary}.")


def _pytorch_is_exact(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    same = all(x is None or x.dtype == hidden.dtype for x in (weight, bias))
    wide = hidden.dtype in (torch.float32, torch.float64)
    plain = not torch.is_autocast_enabled(hidden.device.type)
    known = hasattr(torch.nn, "LinearCrossEntropyOptions")
    return known and same and wide and plain and hidden.shape[0] > 0


def _by_pytorch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    ignore_index: int,
    chunk_tokens: int,
) -> torch.Tensor:
    options: Any = torch.nn.LinearCrossEntropyOptions(  # type: ignore[attr-defined]
        batch_chunk_size=min(chunk_tokens, hidden.shape[0]), chunking_method=None
    )
    return F.linear_cross_entropy(  # type: ignore[attr-defined]
        *(hidden, weight, targets),
        linear_bias=bias,
        reduction="none",
        ignore_index=ignore_index,
        options=options,
    )
