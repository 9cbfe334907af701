"""Metrics that are updated with whole values, equal on all ranks that share a sample.

torchmetrics adds up the states of all ranks. That is right where each rank adds its own tokens. A value
that every rank of a cp group (or tensor-parallel group) adds would count once per rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.logging.reduce import side_by_side
from lightning_cp.mesh import ContextParallelMesh


class ReplicatedMetrics:
    """Makes a module's metrics count one rank of each cp group, until released.

    Args:
        module: the module with the metrics.
        names: dotted names of metrics and collections, as the module declares them.
        mesh: the process groups.

    Raises:
        ConfigError: the module has no metric of a name.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], mesh: ContextParallelMesh) -> None:
        self._before: list[tuple[Metric, Any]] = []
        known = {
            name: part
            for name, part in module.named_modules()
            if isinstance(part, (Metric, MetricCollection))
        }
        for name in [names] if isinstance(names, str) else names:
            if name not in known:
                raise ConfigError(
                    f"context_parallel_replicated_metrics names {name!r}, but the module's metrics are "
                    f"{', '.join(known) or 'none'}. Use the attribute's dotted name."
                )
            for metric in known[name].modules():
                if isinstance(metric, Metric):
                    self._sync(metric, OneOfEachGroup(name, mesh))
        if mesh.tp_size > 1:
            done = {id(metric) for metric, _ in self._before}
            for metric in module.modules():
                if isinstance(metric, Metric) and id(metric) not in done:
                    self._sync(metric, OneOfEachLayer(mesh))

    def _sync(self, metric: Metric, gather: Any) -> None:
        self._before.append((metric, metric.dist_sync_fn))
        metric.dist_sync_fn = gather

    def release(self) -> None:
        """Restore the metrics' own synchronization."""
        for metric, before in reversed(self._before):
            metric.dist_sync_fn = before
        self._before = []


class OneOfEachLayer:
    """Gathers a state over ranks with different tokens: tensor-parallel ranks have equal states."""

    def __init__(self, mesh: ContextParallelMesh) -> None:
        self._mesh = mesh

    def __call__(self, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """Return one tensor for each rank of the ``loss`` group."""
        return gather_all_tensors(state, group or self._mesh.group(Flat.LOSS))

    def __deepcopy__(self, memo: dict[int, Any]) -> OneOfEachLayer:
        return self


class OneOfEachGroup:
    """Gathers a state over the data group; a metric's ``dist_sync_fn``.

    A metric's ``process_group`` would do the same, but a module that holds a group cannot be copied, and
    callbacks that average weights copy it.
    """

    def __init__(self, name: str, mesh: ContextParallelMesh) -> None:
        self._name = name
        self._mesh = mesh

    def __call__(self, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """Return one tensor for each group of ranks that share a sample.

        Raises:
            ConfigError: ranks of a group were fed with different values; on every rank.
        """
        self._check_equal(state)
        return gather_all_tensors(state, group or self._mesh.group(Flat.DATA))

    def _check_equal(self, state: torch.Tensor) -> None:
        """Check that all states are equal but for rounding."""
        values = state.detach().double()
        summary = torch.stack([values.new_tensor(values.numel()), values.sum(), values.abs().sum()])
        (rows,) = side_by_side([summary], self._mesh, Flat.LOSS)
        groups = rows.view(self._mesh.data_size, self._mesh.cp_size, -1)
        first = groups[:, :1].expand_as(groups)
        if not torch.allclose(groups, first, rtol=1e-5, atol=1e-8, equal_nan=True):
            raise ConfigError(
                f"the metric {self._name!r} is declared in context_parallel_replicated_metrics, but ranks "
                "that share a sample updated it with different values. Update it with self.unshard(...) on "
                "every rank, or remove the declaration: updates with a rank's own tokens are added up."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> OneOfEachGroup:
        return self
