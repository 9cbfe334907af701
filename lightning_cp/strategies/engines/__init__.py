"""Engines: how parameters and gradients are kept in step over the ranks that train one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from lightning_cp.mesh import ContextParallelMesh


class Engine(Protocol):
    """Wraps a module so that gradients come out as the mean over the ``loss`` group."""

    @property
    def name(self) -> str:
        """What ``data_parallel=`` selects it by."""
        ...

    def wrap(
        self,
        module: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> nn.Module:
        """The module to call instead of ``module``; parameters equal on all ranks afterwards."""
        ...

    def follow(
        self,
        wrapped: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> nn.Module:
        """What to call instead of ``wrapped`` once ``is_current`` says no, also within a step."""
        ...

    def expect(self, loss: torch.Tensor) -> None:
        """Before backward: have the gradients of this pass averaged too, whichever it is."""
        ...

    def require_averaged(self) -> None:
        """After backward: refuse gradients that stayed on their ranks."""
        ...

    def is_current(self, module: nn.Module) -> bool:
        """Whether the wrapper still serves the parameters that are trained now."""
        ...

    def left_out(self, module: nn.Module) -> list[str]:
        """Names of parameters that are trained now, but were frozen when their module was wrapped."""
        ...


def engine(name: str) -> Engine:
    """The engine that ``data_parallel=name`` asks for; the settings have checked the name."""
    from lightning_cp.strategies.engines.ddp import DDPEngine

    engines: dict[str, Engine] = {"ddp": DDPEngine()}
    return engines[name]
