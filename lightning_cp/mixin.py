"""ContextParallelMixin: what a LightningModule may say about itself. Everything is optional."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn


class ContextParallelMixin:
    """Customises context parallelism for one LightningModule; the strategy works without it too.

    Override what differs from the defaults::

        class Model(ContextParallelMixin, L.LightningModule):
            context_parallel_labels = "aligned"
            context_parallel_sequence_dims = {"tokens": 1, "weights": None}
    """

    context_parallel_sequence_dims: ClassVar[Mapping[str, int | None]] = {}
    """Dotted name of a batch tensor -> its sequence dimension; ``None``: every rank gets all of it."""

    context_parallel_label_key: ClassVar[str | None] = None
    """Dotted name of the labels in a batch; ``None``: as the strategy says (``labels``)."""

    context_parallel_labels: ClassVar[str | None] = None
    """``"aligned"``: labels[i] is the target of token i; ``None``: as the strategy says."""

    context_parallel_num_heads: ClassVar[int | None] = None
    """Query heads, where no attribute of the model tells; ``None``: found."""

    context_parallel_output_dims: ClassVar[Mapping[str, int | None]] = {}
    """Dotted name of what ``predict_step`` returns -> its sequence dimension; ``None``: left as it is."""

    def context_parallel_modules(self) -> Iterable[nn.Module] | None:
        """The Hugging Face models whose attention is swapped; ``None``: all of them."""
        return None

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """A local tensor of the current step, whole, in original order and length, on every rank."""
        strategy: Any = self.trainer.strategy  # type: ignore[attr-defined]
        return strategy.unshard(x, dim=dim) if hasattr(strategy, "unshard") else x

    def token_positions(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """int64 [B or 1, L]: the positions of a step's tokens in the whole sequence, 0 for padding.

        What a model that counts its tokens should use instead; batches that are no dict cannot carry
        ``position_ids``. Without context parallelism it is 0, 1, 2, ... along dimension ``dim`` of ``x``.
        """
        strategy: Any = self.trainer.strategy  # type: ignore[attr-defined]
        if hasattr(strategy, "token_positions"):
            return strategy.token_positions(x, dim=dim)
        return torch.arange(x.size(dim), device=x.device)[None]

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over ranks that share a sample, weighted by their targets: one process's mean.

        For what a step computes from its own tokens and does not pass to ``self.log`` directly: values kept
        for the end of the epoch, metrics that average losses, functions of the loss. Every rank calls it.
        """
        strategy: Any = self.trainer.strategy  # type: ignore[attr-defined]
        return strategy.average(value) if hasattr(strategy, "average") else value


def options_of(module: object) -> dict[str, Any]:
    """What a module declares; empty without the mixin."""
    if not isinstance(module, ContextParallelMixin):
        return {}
    return {
        "sequence_dims": module.context_parallel_sequence_dims,
        "label_key": module.context_parallel_label_key,
        "labels": module.context_parallel_labels,
        "num_heads": module.context_parallel_num_heads,
        "output_dims": module.context_parallel_output_dims,
        "modules": module.context_parallel_modules(),
    }
