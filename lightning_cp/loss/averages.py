"""Logged means over tokens, from a sum and a count of each batch and each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchmetrics import Metric

RATIO_HOOK = "_context_parallel_log"
"""Attribute of the module that ``cp_log`` calls; it is missing without context parallelism."""

Options = tuple[tuple[str, Any], ...]
"""Options of Lightning's ``log``, sorted by name."""


class TokenMean(Metric):
    """Mean over tokens: (sum of totals) / (sum of counts).

    The sums go over all batches since the last reset, and over all ranks. NaN if nothing was counted.
    """

    full_state_update = False
    total: torch.Tensor
    count: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("total", "count"):
            zero = torch.zeros((), dtype=torch.float64)
            self.add_state(name, zero, dist_reduce_fx="sum")  # pyright: ignore[reportUnknownMemberType] (its bare list)
        self.of_all: torch.Tensor | None = None
        """Total and count of all ranks, if one collective added them up for all means."""

    def update(self, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add the total and the count of a batch, or of a rank's part of it: two scalars."""
        self.of_all = None
        self.total = self.total + total
        self.count = self.count + count

    def compute(self) -> torch.Tensor:
        """Return the mean so far."""
        total, count = self.of_all if self.of_all is not None else (self.total, self.count)
        return as_logged(total / count)

    def reset(self) -> None:
        """Reset total and count."""
        super().reset()
        self.of_all = None


def zero_where_uncounted(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the total, or 0 where nothing was counted: NaN times 0, as of a mean over nothing, is NaN."""
    return torch.where(count == 0, torch.zeros_like(total), total)


def as_logged(value: torch.Tensor) -> torch.Tensor:
    """Cast to the dtype of Lightning's logged values: the default one, but at least float32."""
    default = torch.get_default_dtype()
    return value.to(default if default == torch.float64 else torch.float32)


MeansByKey = dict[tuple[Any, ...], TokenMean]
"""Means by hook, name and data loader."""


def log_token_ratio(
    module: Any,
    log: Callable[..., None],
    name: str,
    total: torch.Tensor,
    count: torch.Tensor,
    sums: tuple[torch.Tensor, ...],
    options: Options,
    **mean_options: Any,
) -> None:
    """Log the ratio of ``sums`` for the step, and that of all totals and counts for the epoch."""
    results: Any = module.trainer._results
    if results is None:  # Lightning raises where logging is not possible
        log(name, total / count)
        return
    key = (module._current_fx_name, name, results.dataloader_idx)
    means = stage_means(module.trainer)
    if key not in means:
        means[key] = TokenMean(**mean_options)
    mean = means[key].to(module.device)
    mean.update(total, count)
    # The value of the step, where torchmetrics keeps it.
    mean._forward_cache = as_logged(sums[0] / sums[1])  # pyright: ignore[reportPrivateUsage]
    log(name, mean, metric_attribute=name, **dict(options))


def stage_means(trainer: Any) -> MeansByKey:
    """Return the means of a stage; Lightning resets them when an epoch ends, as a module's own metrics."""
    results = trainer._results
    return {} if results is None else results.__dict__.setdefault("_token_means", {})


NO_LOSS = (
    "average was given a value that is none of the losses which went backward, in a step that declared "
    "several counts, so that it is not known which targets it is a mean over. Average each loss by itself, "
    "between its count_targets and its backward, or after that as it was given to it, and add up the "
    "averages; average other values before the next count_targets."
)
