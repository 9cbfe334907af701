"""Cross-entropies note how many targets their mean was taken over, in any import style."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor

from lightning_cp.loss_terms import Count, note_mean, targets_of
from lightning_cp.models.functions import LINK, Link, Replaced
from lightning_cp.models.handle import SwapHandle

Counted = Callable[..., Count | None]
"""What a mean was taken over; ``SUM`` of a sum, ``None`` of losses that are reduced elsewhere."""

SUM = -1.0


def noted_losses(handle: SwapHandle) -> list[Replaced]:
    """Losses that note what they count while a step is active: means in the graph that backward comes
    through, and in evaluation, where there is none, what is logged."""
    held = weakref.ref(handle)  # what is global must not keep a model alive
    known: list[tuple[Any, str, Counted]]
    known = [(F, name, _counted) for name in ("cross_entropy", "nll_loss")]
    known.append((F, "linear_cross_entropy", _counted_linear))
    known.append((sys.modules.get("litgpt.utils"), "chunked_cross_entropy", _counted_chunked))
    return [
        _noted(home, name, counted, held) for home, name, counted in known if hasattr(home, name)
    ]


def _noted(
    home: Any, name: str, counted: Counted, held: Callable[[], SwapHandle | None]
) -> Replaced:
    original = getattr(home, name)
    link = Link(original)

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
        ):  # of vmap or grad: none after it, and of none of its tokens
            return loss
        count = counted(*args, **kwargs)
        if count is None:
            if state.losses is not None and state.has_target is not None:
                state.losses.note_each(loss, state.has_target)
            return loss
        if count is not SUM:
            note_mean(loss, count)
        if state.losses is not None:
            state.losses.note(loss, None if count is SUM else count)
        return loss

    setattr(noting, LINK, link)
    return Replaced(home, name, noting, link)


def _counted(
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


def _counted_linear(
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


def _counted_chunked(
    logits: Any, targets: torch.Tensor, chunk_size: int = 128, ignore_index: int = -100
) -> Count:
    """LitGPT's."""
    return targets_of(targets, None, ignore_index)
