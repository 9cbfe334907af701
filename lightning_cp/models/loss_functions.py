"""Cross-entropies note how many targets their mean was taken over, in any import style."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lightning_cp.loss_terms import note_mean, targets_of
from lightning_cp.models.functions import LINK, Link, Replaced, replace_everywhere, take_back
from lightning_cp.models.handle import SwapHandle

Note = Callable[..., None]


def follow_losses(handle: SwapHandle) -> None:
    """While a step is active, note the counts of means that backward may come through.

    ``nll_loss`` is left alone: its node in the autograd graph tells.
    """
    held = weakref.ref(handle)  # what is global must not keep a model alive
    known = [(F, "cross_entropy", _note), (F, "linear_cross_entropy", _note_linear)]
    known.append((sys.modules.get("litgpt.utils"), "chunked_cross_entropy", _note_chunked))
    replaced = [
        _replace(home, name, note, held) for home, name, note in known if hasattr(home, name)
    ]
    replace_everywhere({one.link.original: one.ours for one in replaced})
    undo = weakref.finalize(handle, take_back, replaced)
    undo.atexit = False
    handle.on_undo(undo)


def _replace(home: Any, name: str, note: Note, held: Callable[[], SwapHandle | None]) -> Replaced:
    original = getattr(home, name)
    link = Link(original)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = link.original(*args, **kwargs)
        if torch.compiler.is_compiling() or not loss.requires_grad:
            return loss
        handle = held()
        if handle is not None and handle.active:
            note(loss, *args, **kwargs)
        return loss

    setattr(noting, LINK, link)
    return Replaced(home, name, noting, link)


def _note(
    loss: torch.Tensor,
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: object = None,
    ignore_index: int = -100,
    reduce: object = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> None:
    if reduction == "mean" and size_average is None and reduce is None:
        classes = input.shape[1 if len(input.shape) > 1 else 0]
        note_mean(loss, targets_of(target, weight, ignore_index, classes))


def _note_linear(
    loss: torch.Tensor,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    **kwargs: Any,
) -> None:
    if reduction == "mean":
        ignored = -100 if ignore_index is None else ignore_index
        note_mean(loss, targets_of(target, weight, ignored, linear_weight.shape[0]))


def _note_chunked(
    loss: torch.Tensor,
    logits: Any,
    targets: torch.Tensor,
    chunk_size: int = 128,
    ignore_index: int = -100,
) -> None:
    """LitGPT's."""
    note_mean(loss, targets_of(targets, None, ignore_index))
