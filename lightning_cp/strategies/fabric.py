"""Fabric's strategy: DDPStrategy with a sequence dimension, for loops that the user writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
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

from lightning_cp.errors import ConfigError, LightningCPError
from lightning_cp.strategies.engines import Engine
from lightning_cp.strategies.front import ContextParallelFront, in_floating_point
from lightning_cp.strategies.loaders.draws import going_on
from lightning_cp.strategies.loaders.proxy import LoaderProxy
from lightning_cp.strategies.resume.fabric import RunState
from lightning_cp.strategies.saves.fabric import FabricSaves
from lightning_cp.strategies.trainer_hooks import STEPS
from lightning_cp.strategies.watch.steps import WatchedFabricSteps


class UlyssesRingStrategy(WatchedFabricSteps, FabricSaves, ContextParallelFront, DDPStrategy):
    """The Trainer's strategy of the same name, for Fabric; the arguments are the same, and one more.

    A step begins when a batch is sharded and lasts until the next one is, or until ``end_step``::

        model, optimizer = fabric.setup(model, optimizer)
        for batch in fabric.setup_dataloaders(loader):
            batch = fabric.strategy.shard_batch(batch)
            loss = model(**batch).loss
            fabric.backward(loss)
            optimizer.step()

    ``fabric.backward`` weights the loss by the rank's share of targets, so that gradients are those of one
    process; ``average`` gives the loss that one process would show.

    Args:
        shard_dataloaders: loaders of ``fabric.setup_dataloaders`` give sharded batches by themselves; not
            for scripts that shift or cut what a loader gives.
        **kwargs: as for the Trainer's strategy.
    """

    _made_for = "lightning.fabric.Fabric; for the Trainer take lightning_cp.UlyssesRingStrategy"

    def __init__(self, *args: Any, shard_dataloaders: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shard_dataloaders = shard_dataloaders
        self._models = nn.ModuleList()
        self._optimizers: list[Optimizer] = []
        self._steps = 0  # of optimizers
        if self._engine.shards:
            self._backward_sync_control = _LeaveOnRanks(self._engine)
        self._run_state = RunState(self._core)

    def __del__(self) -> None:
        """Give attention back: Fabric does not say when it ends.

        Not by ``weakref.finalize``, which would hold the model: a LightningModule refers to its Fabric, and
        that to this strategy, so that none of the three would ever go.
        """
        core = self.__dict__.get("_core")  # not there if the settings were refused
        if core is not None and not sys.is_finalizing():
            core.detach()

    # -- before the first batch ------------------------------------------------------------------

    @override
    def _set_world_ranks(self) -> None:
        self._check_ranks()  # called when Fabric is made, before anything waits for a rank
        super()._set_world_ranks()

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
        self._build_mesh(module)
        self._models.append(module)
        swapped = self._core.attach(self._models, {}, needs_labels=False)
        if swapped:
            rank_zero_info(f"context parallel attention in: {', '.join(swapped)}")
        if self._watch.is_on:
            self._core.progress.begin_with(module)
        # Fabric itself goes through forward only where what it calls is another module than the user's.
        wrapped = self._wrap(module, STEPS if isinstance(module, LightningModule) else ())
        self._run_state.follow_model(wrapped)
        return wrapped

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
        self._load_whole(module)
        if not self._engine.shards:  # which places a model by itself, part by part
            super().module_to_device(module)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._engine.adopt(optimizer)
        self._optimizers.append(optimizer)
        return super().setup_optimizer(optimizer)

    @override
    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        self._seed_workers(dataloader, overwrite=True)  # Fabric has set one by the global rank
        shared = self._share(super().process_dataloader(dataloader), self._trains)
        self._run_state.follow(shared)
        return _ShardedLoader(shared, self) if self._shard_dataloaders else shared

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

    # -- one batch -------------------------------------------------------------------------------

    def shard_batch(self, batch: Any, *, training: bool | None = None) -> Any:
        """This rank's part of a batch that every rank of its group holds whole; begins a step.

        Args:
            batch: tensors in dicts, tuples, lists, named tuples or dataclasses, nested in any way.
            training: the step calls ``backward``, so that labels are needed; by default whether gradients
                are enabled and a model is in training mode.

        Raises:
            ConfigError: a batch that cannot be read, or labels that nobody says how to read.
            ShapeError: sequences that are too short, unequal, or (padding=False) do not divide.
            BatchMismatchError: ranks of a group hold different batches.
            RankFailure: another rank's batch was refused.
        """
        if training is None:
            training = self._trains()
        if not self._core.was_sharded(batch):
            self._end_last_step()
        if training:
            self._core.require_label_kind()
        local = self._core.shard(batch, needs_labels=training)
        if training:
            self._position.begin_micro_batch()
        self._core.begin_step()
        return local

    def _end_last_step(self) -> None:
        try:
            self.end_step()
        except ConfigError as error:
            raise ConfigError(
                f"{error} Or the batch before was sharded and not used: shard one at a time, each before its "
                "forward."
            ) from None

    def end_step(self) -> None:
        """The models are plain models until the next batch, for what one rank does alone.

        Raises:
            ConfigError: no attention call was intercepted in the step.
        """
        try:
            if self._core.in_step:
                self._core.check_step()
        finally:
            self._core.end_step()

    @override
    def backward(
        self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Backward of a loss, weighted by this rank's share of the targets.

        Raises:
            ConfigError: no batch was sharded, attention stayed local, the loss has nothing to do with the
                model, or backward would come through attention on some ranks only.
            NonFiniteError: a rank without targets has a loss that cannot be made to add nothing.
            RankFailure: that happened on another rank.
        """
        if self._core.enabled and not self._core.in_step:
            raise ConfigError(
                "fabric.backward without a sharded batch, so the loss cannot be weighted. Begin every step "
                "with batch = fabric.strategy.shard_batch(batch), or let loaders do it: "
                "shard_dataloaders=True."
            )
        try:
            self._refuse_unfrozen()
            self._core.check_step()
            self._core.require_loss(tensor)
            self._guard.note_loss(self._core.own_loss(tensor))
            scaled = self._core.scale_loss(tensor, self._optimizers)
            self._engine.expect(scaled)
            super().backward(scaled, module, *args, **kwargs)
            self._core.after_backward(self._models.parameters())
        except BaseException:
            self._core.end_step()
            raise

    def _refuse_unfrozen(self) -> None:
        left_out = self._engine.left_out(self._models)
        if left_out:
            raise ConfigError(
                f"{', '.join(left_out[:3])} ({len(left_out)} in all) were frozen when fabric.setup was "
                "called, and are trained now: DDP would leave their gradients different on every rank. "
                "Unfreeze before fabric.setup; what is to stay fixed for a while can be left out of the "
                "optimizer."
            )

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step along gradients that are complete.

        Raises:
            ConfigError: parameters that are trained got no gradient, so others were not averaged.
            NonFiniteError: on every rank, if some loss or gradient is not finite; nothing has changed.
        """
        closure = kwargs.get("closure")

        def to_the_end() -> Any:
            assert closure is not None
            result = closure()
            self._complete(optimizer)
            return result

        if closure is None:
            self._complete(optimizer)
        else:
            kwargs["closure"] = to_the_end
        stepped = super().optimizer_step(optimizer, **kwargs)
        self._steps += 1
        self._run_state.steps()
        self._engine.after_step()
        self._core.recorder.end()
        return stepped

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        self._complete(optimizer)
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return self._engine.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        self._complete(optimizer)
        self.precision.unscale_gradients(optimizer)
        self._engine.clip_value(self.precision.main_params(optimizer), clip_val)

    def _complete(self, optimizer: Optimizer) -> None:
        """Several backward passes may have filled the gradients; now they are averaged, in final size."""
        try:
            self._engine.require_averaged()
            self._core.end_window(optimizer)
            model = self._models[0] if len(self._models) == 1 else self._models
            self._before_step(self._steps + 1, optimizer, model, self.precision)
        except LightningCPError:
            self._core.end_step()
            raise

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        group = self._counted_once(group, reduce_op)
        return super().all_reduce(in_floating_point(tensor, reduce_op), group, reduce_op)

    def unshard_output(self, output: Any, dims: dict[str, int | None] | None = None) -> Any:
        """Tensors of the current step in any container, in original order and length, on every rank.

        Args:
            output: what a model returned, or a container of it.
            dims: dotted name -> sequence dimension, ``None`` to leave a tensor; 1 for the rest.

        Raises:
            ConfigError: a tensor that is neither along the sequence nor the same on all ranks.
        """
        return self._core.unshard(output, dims or {})

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(model.training for model in self._models)


class _LeaveOnRanks(_BackwardSyncControl):
    """``fabric.no_backward_sync`` of engines that shard."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._engine.accumulating(module) if enabled else nullcontext()


class _ShardedLoader(LoaderProxy):
    """A loader whose batches are moved to the device and sharded."""

    __slots__ = ("_strategy",)

    def __init__(self, loader: Any, strategy: UlyssesRingStrategy) -> None:
        super().__init__(loader)
        self._strategy = strategy

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            moved = self._strategy.batch_to_device(batch)
            yield self._strategy.shard_batch(moved)
