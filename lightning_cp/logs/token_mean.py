"""A mean over tokens, of which every rank and every batch knows a sum and a count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchmetrics import Metric

RATIO_HOOK = "_context_parallel_log"
"""The module's attribute that ``cp_log`` calls; there is none without context parallelism."""

Options = tuple[tuple[str, Any], ...]
"""Of Lightning's ``log``, sorted by name."""


class TokenMean(Metric):
    """(sum of totals) / (sum of counts) over all batches since the last reset, and over all ranks.

    If nothing was counted at all, it is NaN.
    """

    full_state_update = False
    total: torch.Tensor
    count: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("total", "count"):
            zero = torch.zeros((), dtype=torch.float64)
            self.add_state(name, zero, dist_reduce_fx="sum")
        self.of_all: torch.Tensor | None = None
        """Total and count of all ranks, where they were added up in one exchange for all means."""

    def update(self, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add what a batch, or a rank's part of one, holds: two scalars."""
        self.of_all = None
        self.total = self.total + total
        self.count = self.count + count

    def compute(self) -> torch.Tensor:
        """The mean so far."""
        total, count = self.of_all if self.of_all is not None else (self.total, self.count)
        return as_logged(total / count)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.of_all = None


def where_counted(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The total, or 0 where nothing was counted: a mean over nothing times nothing is NaN."""
    return torch.where(count == 0, torch.zeros_like(total), total)


def as_logged(value: torch.Tensor) -> torch.Tensor:
    """In the type in which Lightning keeps what is logged: the default, but no less than float32."""
    default = torch.get_default_dtype()
    return value.to(default if default == torch.float64 else torch.float32)


Means = dict[tuple[Any, ...], TokenMean]
"""By hook, name and data loader."""


def show_ratio(
    module: Any,
    log: Callable[..., None],
    name: str,
    total: torch.Tensor,
    count: torch.Tensor,
    sums: tuple[torch.Tensor, ...],
    options: Options,
    **mean_options: Any,
) -> None:
    """Log the ratio of ``sums`` at the step, and for the epoch the one of all totals and counts."""
    results: Any = module.trainer._results
    if results is None:  # Lightning says where logging is not possible
        log(name, total / count)
        return
    key = (module._current_fx_name, name, results.dataloader_idx)
    means = means_of(module.trainer)
    if key not in means:
        means[key] = TokenMean(**mean_options)
    mean = means[key].to(module.device)
    mean.update(total, count)
    mean._forward_cache = as_logged(sums[0] / sums[1])
    log(name, mean, metric_attribute=name, **dict(options))


def means_of(trainer: Any) -> Means:
    """The means of a stage; Lightning resets them when an epoch ends, as it does a module's own metrics."""
    results = trainer._results
    return {} if results is None else results.__dict__.setdefault("_token_means", {})
