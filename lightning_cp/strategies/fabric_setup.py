"""Fabric's strategy before the first batch: processes, mesh, attention, models, optimizers and loaders."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.errors import UndeclaredError
from lightning_cp.strategies.arguments.parity import check_asked
from lightning_cp.strategies.engines import Engine
from lightning_cp.strategies.front import ContextParallelFront
from lightning_cp.strategies.loaders.draws import going_on
from lightning_cp.strategies.loaders.loops import FabricLoader, Loops
from lightning_cp.strategies.parity.fabric import asked_in_fabric
from lightning_cp.strategies.resume.fabric import RunState
from lightning_cp.strategies.saves.fabric import FabricSaves
from lightning_cp.strategies.step.max_logits import adopted
from lightning_cp.strategies.trainer_hooks import STEPS
from lightning_cp.strategies.undeclared import of_run
from lightning_cp.strategies.watch.alike import require_same_model, require_same_optimizers
from lightning_cp.strategies.watch.steps import WatchedFabricSteps


class FabricSetup(WatchedFabricSteps, FabricSaves, ContextParallelFront, DDPStrategy):
    """Methods that Fabric calls before a loop begins."""

    def __init__(self, *args: Any, shard_dataloaders: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_asked(self._settings, given="parity_check" in kwargs)
        self._shard_dataloaders = shard_dataloaders

    @override
    def _prepare(self) -> None:
        super()._prepare()
        self._core.ask_for_counts = asked_in_fabric()
        self._guard.look = self._core.refuse_unknown
        self._models = nn.ModuleList()
        self._optimizers: list[Optimizer] = []
        self._steps = 0  # of optimizers
        self._loops = Loops(self._core)
        if self._engine.shards:
            self._backward_sync_control = _LeaveOnRanks(self._engine)
        self._run_state = RunState(self._core)

    _of_a_run = ContextParallelFront._of_a_run | {
        *("_loops", "_models", "_optimizers", "_run_state", "_steps")
    }

    def __del__(self) -> None:
        """Give attention back: Fabric does not say when it ends.

        Not by ``weakref.finalize``, which would hold the model: a LightningModule refers to its Fabric, and
        that to this strategy, so that none of the three would ever go.
        """
        core = self.__dict__.get("_core")  # not there if the settings were refused
        if core is not None and not sys.is_finalizing():
            core.detach()

    @override
    def _set_world_ranks(self) -> None:
        self._check_ranks()  # called when Fabric is made, before anything waits for a rank
        super()._set_world_ranks()
        self._hide_library_warnings()

    @override
    def setup_environment(self) -> None:
        self._check_launcher()
        with going_on():
            super().setup_environment()
        self._check_world()
        self._begin_watch()
        self._build_mesh()

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        require_same_model(module)
        try:
            self._build_mesh(module)
        except UndeclaredError as error:
            every = nn.ModuleList([*self._models, module])
            asked = {"needs_labels": module.training}
            raise of_run(error, every, {}, self._core.settings, **asked) from None
        swapped = self._attach(module)
        if swapped:
            rank_zero_info(f"context parallel attention in: {', '.join(swapped)}")
        if self._watch.is_on:
            self._core.progress.begin_with(module)
        # Fabric itself goes through forward only where what it calls is another module than the user's.
        steps = STEPS if isinstance(module, LightningModule) else ()
        wrapped = self._wrap(module, ("forward", *steps))
        self._run_state.follow_model(wrapped)
        return wrapped

    def _attach(self, module: nn.Module) -> list[str]:
        """One model more; if it is refused, those that there are go on as they were."""
        models = nn.ModuleList([*self._models, module])
        try:
            swapped = self._core.attach(models, {}, needs_labels=False)
        except BaseException:
            if len(self._models):
                self._core.attach(self._models, {}, needs_labels=False)
            raise
        self._models = models
        return swapped

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """With ``empty_init`` models are built without memory, for engines that fill each rank's part."""
        if not (empty_init and self._engine.shards):
            return super().module_init_context(empty_init)
        stack = ExitStack()
        stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def module_to_device(self, module: nn.Module) -> None:
        if self._whole and self._core.settings.pretrained is not None:
            require_same_model(module)  # the setup comes later, and ranks load together
        self._load_whole(module)
        if not self._engine.shards:  # which places a model by itself, part by part
            super().module_to_device(module)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        adopted(optimizer, self._engine.adopt)
        require_same_optimizers([optimizer], self._models)
        self._optimizers.append(optimizer)
        self._core.clip_for(self._optimizers)
        self._run_state.follow_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    @override
    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        self._seed_workers(dataloader, overwrite=True)  # Fabric has set one by the global rank
        shared = self._share(super().process_dataloader(dataloader), self._trains)
        self._run_state.follow(shared)
        return FabricLoader(
            shared, self._loops, partial(_move_and_shard, self) if self._shard_dataloaders else None
        )

    @property
    def run_state(self) -> RunState:
        """Random numbers of every rank and the place of every loader, for ``fabric.save`` and ``load``."""
        self._run_state.device = self.root_device
        return self._run_state

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        """``None`` without data ranks: then Fabric leaves samplers alone, and the order is one process's."""
        return super().distributed_sampler_kwargs if self.data_parallel_size > 1 else None

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(model.training for model in self._models)


def _move_and_shard(strategy: Any, batch: Any) -> Any:
    return strategy.shard_batch(strategy.batch_to_device(batch))


class _LeaveOnRanks(_BackwardSyncControl):
    """``fabric.no_backward_sync`` of engines that shard."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a copied strategy makes one for its own engine."""
        return {}

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._engine.accumulating(module) if enabled else nullcontext()
