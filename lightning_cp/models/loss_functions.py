"""Cross-entropy replacements that record the number of targets of their mean, in any import style."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor

from lightning_cp.loss.terms import targets_of
from lightning_cp.models.handle import SwapHandle
from lightning_cp.utils.autograd_notes import Count, note_origin
from lightning_cp.utils.patching import ChainedPatch, ReplacedFunction

CountTargets = Callable[..., Count | None]
"""Returns the target count of a mean, ``SUM`` for a sum, ``None`` for losses that are not reduced."""

SUM = -1.0


def loss_replacements(handle: SwapHandle) -> list[ReplacedFunction]:
    """Return loss functions that record their target count while a step is active.

    In training the count goes onto the autograd graph; in evaluation, without a graph, to the step's record
    of losses, which logged values are compared with.
    """
    held = weakref.ref(handle)  # a global must not keep a model alive
    known: list[tuple[Any, str, CountTargets]]
    known = [(F, name, _count_cross_entropy) for name in ("cross_entropy", "nll_loss")]
    known.append((F, "linear_cross_entropy", _count_linear))
    known.append((sys.modules.get("litgpt.utils"), "chunked_cross_entropy", _count_litgpt))
    return [
        _noting_replacement(home, name, counted, held)
        for home, name, counted in known
        if hasattr(home, name)
    ]


def _noting_replacement(
    home: Any, name: str, counted: CountTargets, held: Callable[[], SwapHandle | None]
) -> ReplacedFunction:
    original = getattr(home, name)
    link = ChainedPatch(original)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = link.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return loss
        handle = held()
        state = None if handle is None else handle.state
        if state is None or not (loss.requires_grad or state.losses is not None):
            return loss
        if is_functorch_wrapped_tensor(
            loss
        ):  # inside vmap or grad: no final loss, no own token count
            return loss
        count = counted(*args, **kwargs)
        if count is None:
            if state.losses is not None and state.has_target is not None:
                state.losses.note_each(loss, state.has_target)
            return loss
        if count is not SUM:
            note_origin(loss, count)
        if state.losses is not None:
            state.losses.note(loss, None if count is SUM else count)
        return loss

    return ReplacedFunction(home, name, noting, link)


def _count_cross_entropy(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Count | None:
    if size_average is not None or reduce is not None or reduction == "none":
        return None
    if reduction == "sum":
        return SUM
    classes = input.shape[1 if len(input.shape) > 1 else 0]
    return targets_of(target, weight, ignore_index, classes)


def _count_linear(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    **kwargs: Any,
) -> Count | None:
    if reduction != "mean":
        return SUM if reduction == "sum" else None
    ignored = -100 if ignore_index is None else ignore_index
    return targets_of(target, weight, ignored, linear_weight.shape[0])


def _count_litgpt(
    logits: Any, targets: torch.Tensor, chunk_size: int = 128, ignore_index: int = -100
) -> Count:
    """Return the target count of LitGPT's ``chunked_cross_entropy``."""
    return targets_of(targets, None, ignore_index)
