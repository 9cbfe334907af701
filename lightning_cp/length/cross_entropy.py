"""Cross-entropy of a linear head, whose logits exist for a few tokens at a time only.

    logits = change(hidden W^T + b),   loss = log sum exp(logits) - logits[target]

``[tokens, vocabulary]`` logits are most of a long sequence's memory: in float32, with a vocabulary of
128,000, half a megabyte a token, and several times that while they are differentiated. Here forward keeps
one number per token (the log of the sum), and backward makes each chunk's logits again.

What ``torch.nn.functional.linear_cross_entropy`` of PyTorch 2.13 does
(``options=LinearCrossEntropyOptions(...)``; without, it holds the logits), seen on CPU
(``python -m lightning_cp.bench.loss``):

- It never holds the logits, whatever the reduction; it takes a bias, ``ignore_index`` and float64.
- ``mean`` and ``sum`` make gradients within forward, so that these are held from there to backward.
  ``none`` makes them in backward, from logits made anew. Of bfloat16 inputs each gives bfloat16: the sum
  of ``mean`` and ``sum`` is rounded once a chunk, and ``none`` rounds every token's loss.
- Backward multiplies what comes by 0 where a target is ignored: of an infinite gradient (a mean over no
  target) that is NaN, and not the exact 0 of ``cross_entropy``.
- It does not heed autocast, and has no place for what models do to logits (caps, scales).

So its ``none`` is used for float32 and float64 without autocast, cap or scale, on PyTorch 2.13 or later,
behind a mask; all else goes through ``ChunkedLosses``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.length.chunked_losses import Change, ChunkedLosses
from lightning_cp.loss_terms import note_mean

DEFAULT_CHUNK_TOKENS = 1024
"""Enough for matrix products at full speed, and for reading the weight's gradient seldom."""


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
    """Cross-entropy of ``hidden @ weight.T + bias``, holding the logits of ``chunk_tokens`` tokens at most.

    Exact: what ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)`` is, but for the order
        of additions, under autocast too. Losses and their sum are float32 (float64 of float64), and so
        are the sums over chunks of the weight's and the bias's gradients.

    Args:
        hidden_BLC: ``[..., C]``, what the head is given.
        weight_VC: ``[V, C]``, the head's weight, whole: of a module that is sharded call this within its
            forward.
        bias_V: ``[V]`` or ``None``.
        targets_BL: int64 ``[...]``: the target of each token, not to be shifted any more.
        ignore_index: a target that counts nothing.
        reduction: ``none``, ``sum``, or ``mean`` over the targets that count (NaN if none does).
        chunk_tokens: tokens whose logits exist at once.
        scale: factor of the logits.
        softcap: scaled logits become ``softcap * tanh(logits / softcap)``; 0: they stay.

    Returns:
        ``[...]`` losses, 0 where nothing counts; or one number.

    Raises:
        ConfigError: ``chunk_tokens`` or ``reduction`` that is none, or a sharded weight.
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
    """The same with any change of each logit; see ``linear_cross_entropy``."""
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
    losses = losses.where(counts, 0)  # its backward lets nothing through, not even an infinity
    if reduction == "none":
        return losses.view(targets_BL.shape)
    if reduction == "sum":
        return losses.sum()
    count = counts.sum()
    mean = losses.sum() / count
    note_mean(mean, count)
    return mean


def check_chunk_tokens(name: str, value: object) -> None:
    """Refuse what is no number of tokens.

    Raises:
        ConfigError: naming it.
    """
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{name} must be a number of tokens, an integer of at least 1, got {value!r}. "
            "Leave it out for the default."
        )


def compute_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype in which the head's product is computed: autocast's, where it is on."""
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
        return  # looking would wait for the device, which notices by itself
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
