"""Kinds of values given to ``self.log``, and their form once the ranks have agreed on them."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, Metric

from lightning_cp.logs.settle import Kind
from lightning_cp.logs.token_mean import as_logged

ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
"""Of ``LightningModule.log`` after the value, by position."""


def show_metric(
    log: Callable[..., None],
    name: str,
    metric: Metric,
    cache: Any,
    shown: torch.Tensor | None,
    options: dict[str, Any],
) -> None:
    """Log a metric that shows at this step what it had then (``cache``), or what ranks agreed on."""
    now = metric._forward_cache
    metric._forward_cache = cache if shown is None else as_logged(shown)
    try:
        log(name, metric, **options)
    finally:
        metric._forward_cache = now


def numbers_in(metric: MeanMetric) -> torch.Tensor:
    """Their sum; 0 where it was given more than one value at a time, each of which counts."""
    total, weight = (torch.as_tensor(x).detach() for x in (metric.mean_value, metric.weight))
    return torch.where(weight == metric._update_count, total, 0.0).reshape(())


def as_given(shown: torch.Tensor, value: Any) -> torch.Tensor:
    """The value that ranks agreed on, in the type of the given one."""
    if not isinstance(value, torch.Tensor):
        return as_logged(shown)
    shown = shown.to(value)
    if not value.requires_grad:
        return shown
    return shown + torch.nan_to_num(value.reshape(()) - value.detach().reshape(()))  # enable_graph


def whole(value: Any) -> Any:
    """A value that is spread over ranks, as one number on every rank: the norm of sharded gradients."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def kind_of(value: Any, options: dict[str, Any]) -> Kind | None:
    """The way ranks' values become one; ``None``: Lightning says what is wrong with it."""
    if isinstance(value, Metric):
        return Kind.METRIC
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        flag, integer = value.dtype == torch.bool, not value.is_floating_point()
    elif isinstance(value, Real):  # NumPy's own as well
        flag, integer = isinstance(value, bool), isinstance(value, Integral)
    else:
        return None
    if flag or integer:
        return Kind.FLAG if flag else Kind.COUNT
    reduction = options.get("reduce_fx")
    if isinstance(reduction, str):
        reduction = reduction.lower()
    return next((kind for kind, known in _REDUCTIONS.items() if reduction in known), Kind.MEAN)


_REDUCTIONS: dict[Kind, tuple[Any, ...]] = {
    Kind.SUM: ("sum", torch.sum, sum),
    Kind.LARGEST: ("max", torch.max, max),
    Kind.SMALLEST: ("min", torch.min, min),
}
