"""The interface of engines, which synchronise parameters and gradients over the ranks that train one
model.
"""

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
    from lightning_cp.engines.ddp_comm_hook import CommHook


class Engine(Protocol):
    """Wraps a module so that gradients come out as the mean over the ``loss`` group."""

    before_exchange: Callable[[], object]
    """Called before ranks exchange parameters in a model's forward."""

    @property
    def name(self) -> str:
        """The value of ``data_parallel=`` that selects this engine."""
        ...

    @property
    def shards(self) -> bool:
        """True if parameters become DTensors in place. The engine then moves the module and clips gradients
        itself.
        """
        ...

    def wrap(
        self,
        module: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
        methods: Sequence[str] = ("forward",),
    ) -> nn.Module:
        """Wrap ``module`` and return the module to call; afterwards parameters are equal on all ranks.

        Args:
            module: the user's; an engine that ``shards`` moves it to the device itself.
            mesh: the process groups.
            device: the device that computes.
            options: the strategy's arguments for DistributedDataParallel.
            methods: names of the module's step methods; a backward may follow each of them.
        """
        ...

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        """Have an optimizer that was made before wrapping step the current parameters."""
        ...

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """A block whose backward passes leave gradients unsynchronised; a later backward averages them."""
        ...

    def rewrap(
        self,
        wrapped: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> nn.Module:
        """Return the module to call instead of ``wrapped`` once ``is_current`` is False, also within a
        step.
        """
        ...

    def prepare_backward_after_rewrap(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Average the gradients of the coming backward, after a new wrapper was made within a step."""
        ...

    def prepare_backward(self, loss: torch.Tensor) -> None:
        """Before each backward: have the gradients of this pass averaged too."""
        ...

    def finish_backward(self) -> None:
        """After backward: complete gradients, and raise if some were not averaged."""
        ...

    def isolated(self, model: nn.Module) -> AbstractContextManager[None]:
        """A block whose steps leave no trace in the run: no gradient is averaged or recorded by an engine
        that does not shard.
        """
        ...

    def unreduced_gradients(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Parameters with unreduced gradients of this rank that are not in ``grad`` yet."""
        ...

    def count_unsynced(self, parameters: Iterable[torch.Tensor]) -> int:
        """Count the parameters whose gradients ``accumulating`` left unsynchronised. Collective."""
        ...

    def after_optimizer_step(self) -> None:
        """Called after an optimizer has changed parameters, maybe within a step of the model."""
        ...

    def is_current(self, module: nn.Module) -> bool:
        """True if the wrapper serves the parameters that are trained now."""
        ...

    def frozen_at_wrap(self, module: nn.Module) -> list[str]:
        """Names of parameters that are trained now, but were frozen when their module was wrapped."""
        ...

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale gradients so that their global norm is at most ``max_norm``; return the norm before."""
        ...

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clamp every element of the gradients to [-value, value]."""
        ...


def engine(settings: StrategyConfig, hook: CommHook) -> Engine:
    """The engine that ``data_parallel=`` selects; the settings have checked the name.

    Args:
        settings: the user's settings.
        hook: the communication hook with which ``ddp`` averages gradients.
    """
    if settings.data_parallel == "ddp":
        from lightning_cp.engines.ddp import DDPEngine

        return DDPEngine(settings, hook)
    from lightning_cp.engines.fsdp import ShardedEngine

    return ShardedEngine(settings)
