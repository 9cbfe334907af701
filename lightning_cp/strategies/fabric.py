"""Fabric's strategy: DDPStrategy with a sequence dimension, for loops that the user writes: one batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
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

from lightning_cp.batch.step_state import ONE_BATCH
from lightning_cp.consistency.model import require_same_model, require_same_optimizers
from lightning_cp.engines.base import Engine
from lightning_cp.errors import ConfigError, LightningCPError, UndeclaredError
from lightning_cp.loaders.rng import going_on
from lightning_cp.randomness.token_draws import without_token_draws
from lightning_cp.resume.fabric import RunState
from lightning_cp.runtime.model_binding import adopted
from lightning_cp.runtime.runtime import in_floating_point
from lightning_cp.strategies.base import ContextParallelFront
from lightning_cp.strategies.fabric_loops import FabricLoader, Loops
from lightning_cp.strategies.lightning_patches import STEPS
from lightning_cp.strategies.parity_checks import FabricParity, asked_in_fabric
from lightning_cp.strategies.saves_fabric import FabricSaves
from lightning_cp.strategies.undeclared import asking_at_once, of_run
from lightning_cp.strategies.validation import check_asked
from lightning_cp.strategies.watch import WatchedFabricSteps

# Fabric's strategy before the first batch: processes, mesh, attention, models, optimizers and loaders.


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


class UlyssesRingStrategy(FabricSetup):
    """The Trainer's strategy of the same name, for Fabric; the arguments are the same, and one more.

    A step begins when a batch is sharded and lasts until the next one is, until the loop over its loader
    ends, or until ``end_step``::

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
        self._loops.begin_step()
        if not self._core.was_sharded(batch):
            self._end_last_step()
        try:
            if training:
                self._core.require_label_kind()
                if not self._steps:
                    self._core.check_trains()
            local = self._core.shard(batch, needs_labels=training)
        except UndeclaredError as error:
            asked = {"needs_labels": training, "batch": batch}
            raise of_run(error, self._models, {}, self._core.settings, **asked) from None
        if training:
            self._position.begin_micro_batch()
        self._core.begin_step()
        return local

    def check_parity(self, batch: Any, step: Callable[[Any], Any]) -> str:
        """Compare a step on one process with the same step context parallel; ``parity_tokens`` says how much.

        Nothing is changed: gradients, buffers, metrics and random numbers are afterwards what they were.

        Args:
            batch: whole, not sharded yet.
            step: calls models that were set up, and returns the loss; without ``backward``.

        Returns:
            A line, which the first rank prints, too.

        Raises:
            ParityError: on every rank, where they differ, with the likely cause.
            ConfigError: no model was set up, or a step that cannot be compared.
        """
        self._end_last_step()
        self._core.check_trains()
        with asking_at_once(self._core.settings):
            return FabricParity(self._core, self._engine, self._models, self.precision).check(
                batch, step, partial(super().backward, module=None)
            )

    def _end_last_step(self) -> None:
        unused = self._core.is_unused and not self._core.is_left
        self.end_step()
        if unused:
            raise ConfigError(
                f"the batch before was sharded, and no model was called with it. {ONE_BATCH} Shard a batch "
                "before its forward: a forward belongs to the batch that was sharded last. To leave a batch "
                "out, call fabric.strategy.end_step() first."
            )

    def end_step(self) -> None:
        """The models are plain models until the next batch, for what one rank does alone.

        Raises:
            ConfigError: the models were called in the step, and no attention call was intercepted.
        """
        self._core.close_step()

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
                "shard_dataloaders=True. Go backward before the step ends: with its loop over a loader, or "
                "when another strategy is set up or begins a step."
            )
        try:
            self._refuse_unfrozen()
            self._core.check_step()
            self._core.require_loss(tensor)
            self._note_loss(tensor, self._optimizers)
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
            ConfigError: parameters that are trained got no gradient, so others were not averaged; or no
                backward of the window was outside of ``no_backward_sync``.
            NonFiniteError: on every rank, if some loss or gradient is not finite; nothing has changed.
        """
        closure, after = kwargs.get("closure"), ExitStack()

        def complete() -> None:
            self._complete(optimizer)
            after.enter_context(
                without_token_draws()
            )  # an optimizer draws for parameters, not for tokens

        def to_the_end() -> Any:
            assert closure is not None
            after.close()
            result = self._core.closure_value(closure, optimizer)
            complete()
            return result

        if closure is None:
            complete()
        else:
            kwargs["closure"] = to_the_end
        with after:
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
        """Several backward passes may have filled the gradients; now they are averaged, in final size.

        Raises:
            ConfigError: they are not averaged.
        """
        try:
            self._engine.require_averaged()
            self._refuse_kept_back(optimizer)
            self._core.end_window(optimizer)
            model = self._models[0] if len(self._models) == 1 else self._models
            self._before_step(self._steps + 1, optimizer, model, self.precision)
        except LightningCPError:
            self._core.end_step()
            raise

    def _refuse_kept_back(self, optimizer: Optimizer) -> None:
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        kept = self._engine.kept_back(stepped)
        if kept:
            raise ConfigError(
                f"gradients of {kept} parameters of this {type(optimizer).__name__} are this rank's "
                "alone: the last backward that came to them was within fabric.no_backward_sync, and none "
                "since has averaged them. Go through the last micro-batch of every window outside of it "
                "(enabled=False), so that its backward averages all of them; then clip, and step."
            )

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
