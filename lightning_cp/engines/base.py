"""Engines: how parameters and gradients are kept in step over the ranks that train one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cp.mesh import ContextParallelMesh

if TYPE_CHECKING:
    from lightning_cp.config import StrategyConfig
    from lightning_cp.engines.ddp_options import CommHook


class Engine(Protocol):
    """Wraps a module so that gradients come out as the mean over the ``loss`` group."""

    before_data: Callable[[], object]
    """What to call before ranks exchange parameters in a model's forward."""

    @property
    def name(self) -> str:
        """The value of ``data_parallel=`` that selects it."""
        ...

    @property
    def shards(self) -> bool:
        """Parameters become DTensors in place: also where nothing is trained, and clipped by us."""
        ...

    def wrap(
        self,
        module: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
        methods: Sequence[str] = ("forward",),
    ) -> nn.Module:
        """The module to call instead of ``module``; parameters equal on all ranks afterwards.

        Args:
            module: the user's; an engine that ``shards`` moves it to the device by itself.
            mesh: the process groups.
            device: where it computes.
            options: what is DistributedDataParallel's own among the strategy's arguments.
            methods: those of the module that are steps; a backward may follow these.
        """
        ...

    def adopt(self, optimizer: Optimizer) -> None:
        """Have an optimizer that was made before its model was wrapped step the parameters there are now."""
        ...

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """A block whose backward passes leave gradients on their ranks, to be averaged with a later one."""
        ...

    def follow(
        self,
        wrapped: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> nn.Module:
        """The module to call instead of ``wrapped`` once ``is_current`` says no, also within a step."""
        ...

    def rejoin(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """After ``follow`` within a step: have the gradients of the coming backward averaged."""
        ...

    def expect(self, loss: torch.Tensor) -> None:
        """Before backward: have the gradients of this pass averaged too, whichever it is."""
        ...

    def require_averaged(self) -> None:
        """After backward: complete gradients, and refuse those that stayed on their ranks."""
        ...

    def aside(self, model: nn.Module) -> AbstractContextManager[None]:
        """A block whose steps do not belong to the run: an engine that does not shard remembers none of
        them, and leaves their gradients on their ranks.
        """
        ...

    def unreduced(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Parameters with gradients of this rank alone, where these are not in ``grad`` yet."""
        ...

    def kept_back(self, parameters: Iterable[torch.Tensor]) -> int:
        """The number of them with gradients that are this rank's alone, as ``accumulating`` has left them.

        All ranks come here together.
        """
        ...

    def after_step(self) -> None:
        """An optimizer has changed parameters, maybe within a step of the model."""
        ...

    def is_current(self, module: nn.Module) -> bool:
        """True if the wrapper still serves the parameters that are trained now."""
        ...

    def left_out(self, module: nn.Module) -> list[str]:
        """Names of parameters that are trained now, but were frozen when their module was wrapped."""
        ...

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale gradients so that their norm, that of one process, is at most ``max_norm``; the norm."""
        ...

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clamp every element of the gradients to [-value, value]."""
        ...


def engine(settings: StrategyConfig, hook: CommHook) -> Engine:
    """The engine that ``data_parallel=`` asks for; the settings have checked the name.

    Args:
        settings: the user's.
        hook: how ``ddp`` averages gradients.
    """
    if settings.data_parallel == "ddp":
        from lightning_cp.engines.ddp import DDPEngine

        return DDPEngine(settings, hook)
    from lightning_cp.engines.fsdp import ShardedEngine

    return ShardedEngine(settings)
