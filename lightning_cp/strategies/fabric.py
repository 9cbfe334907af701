"""UlyssesRingStrategy of Fabric: every override of Lightning's DDPStrategy, and the methods of a loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from lightning_cp.consistency.model import check_same_model, check_same_optimizers
from lightning_cp.engines.base import Engine
from lightning_cp.errors import ConfigError, LightningCPError, UndeclaredError
from lightning_cp.launch.preemption import record_sigterm
from lightning_cp.launch.ranks import connect
from lightning_cp.launch.worker_results import reporting_launcher
from lightning_cp.loaders.rng import keep_random_state
from lightning_cp.randomness.token_draws import without_token_draws
from lightning_cp.resume.fabric import RunState
from lightning_cp.strategies.base import ContextParallelStrategy, integers_to_float64
from lightning_cp.strategies.declarations import collect_undeclared, complete_errors
from lightning_cp.strategies.fabric_loops import FabricLoader, Loops
from lightning_cp.strategies.lightning_patches import STEPS, unscale_with_ranks
from lightning_cp.strategies.parity_checks import FabricParity, fabric_question
from lightning_cp.strategies.validation import check_fabric_parity
from lightning_cp.utils.tensors import optimizer_parameters
from lightning_cp.watchdog.phase import Phase, Position

if TYPE_CHECKING:
    from lightning_cp.strategies.fabric_checkpoints import FabricCheckpoints


class UlyssesRingStrategy(ContextParallelStrategy, DDPStrategy):
    """The Trainer's strategy of the same name, for Fabric; the arguments are the same, and one more.

    A step begins when a batch is sharded. It ends with the next batch, with the loop over its loader, or with
    ``end_step``::

        model, optimizer = fabric.setup(model, optimizer)
        for batch in fabric.setup_dataloaders(loader, move_to_device=False):
            batch = fabric.strategy.shard_batch(batch)
            loss = model(**batch).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    ``fabric.backward`` weights the loss by the rank's share of targets, so that gradients are those of one
    process; ``average`` gives the loss that one process would show.

    Args:
        shard_dataloaders: loaders of ``fabric.setup_dataloaders`` give sharded batches by themselves; not
            for scripts that shift or cut a loader's batches.
        **kwargs: as for the Trainer's strategy.
    """

    _made_for = "lightning.fabric.Fabric; for the Trainer take lightning_cp.UlyssesRingStrategy"

    def __init__(self, *args: Any, shard_dataloaders: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        arguments = signature(ContextParallelStrategy).bind_partial(*args, **kwargs).arguments
        check_fabric_parity(self._settings, arguments)
        self._shard_dataloaders = shard_dataloaders

    @override
    def _make_own_components(self) -> None:
        if self._checkpoint_io is not None:
            self.checkpoint_io = self._checkpoint_io  # checked
        self.runtime.losses.question = fabric_question()
        self._vote.look = self.runtime.losses.raise_unknown
        self._models = nn.ModuleList()
        self._optimizers: list[Optimizer] = []
        self._steps = 0  # of optimizers
        self._loops = Loops(self.runtime)
        if self.engine.shards:
            self._backward_sync_control = _LeaveOnRanks(self.engine)
        self._run_state = RunState(self.runtime.meshes)

    @cached_property
    def _checkpoints(self) -> FabricCheckpoints:
        from lightning_cp.strategies.fabric_checkpoints import FabricCheckpoints

        return FabricCheckpoints(self._manager, self.runtime)

    def __del__(self) -> None:
        """Restore the model's attention: Fabric has no end.

        ``weakref.finalize`` would keep the model alive: a LightningModule refers to its Fabric, and that to
        this strategy, so that none of the three would ever be deleted.
        """
        runtime = self.__dict__.get("runtime")  # None if the settings were refused
        if runtime is not None and not sys.is_finalizing():
            self._patches.undo()
            runtime.detach()

    # -- processes -----------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = reporting_launcher(self._launcher)

    @override
    def _set_world_ranks(self) -> None:
        self._check_ranks()  # called when Fabric is made, before anything waits for a rank
        super()._set_world_ranks()
        self._hide_library_warnings()

    def set_worker_rank(self) -> None:
        """Set the rank of a worker in Lightning, before it prints as the first rank."""
        self._set_world_ranks()

    @override
    def setup_environment(self) -> None:
        self._check_launcher()
        with keep_random_state():
            super().setup_environment()
        self._check_world()
        self._begin_watch(self.precision)
        self._build_mesh()
        if self.engine.shards:
            unscale_with_ranks(self._patches, self.precision, self.runtime.meshes)

    @override
    def _setup_distributed(self) -> None:
        connect(self)
        super()._setup_distributed()

    # -- models, optimizers, loaders -------------------------------------------------------------------

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Build models without memory with ``empty_init``, for engines that fill each rank's part."""
        if not (empty_init and self.engine.shards):
            return super().module_init_context(empty_init)
        stack = ExitStack()
        stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def module_to_device(self, module: nn.Module) -> None:
        if not self.engine.shards and self._settings.pretrained is not None:
            check_same_model(module)  # setup comes later, and the load is collective
        self._load_whole(module)
        if not self.engine.shards:  # else the engine places the model, part by part
            super().module_to_device(module)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        check_same_model(module)
        try:
            self._build_mesh(module)
        except UndeclaredError as error:
            every = nn.ModuleList([*self._models, module])
            asked = {"needs_labels": module.training}
            raise collect_undeclared(error, every, {}, self._settings, **asked) from None
        swapped = self._attach(module)
        if swapped:
            rank_zero_info(f"context parallel attention in: {', '.join(swapped)}")
        if self.runtime.watch.is_on:
            self.runtime.progress.begin_with(module)
        # Fabric reaches steps through forward only if its module is not the user's.
        steps = STEPS if isinstance(module, LightningModule) else ()
        wrapped = self._wrap(module, ("forward", *steps))
        self._run_state.track_model(wrapped)
        return wrapped

    def _attach(self, module: nn.Module) -> list[str]:
        """Add a model; if it is refused, earlier models stay attached."""
        models = nn.ModuleList([*self._models, module])
        try:
            swapped = self.runtime.attach(models, {}, needs_labels=False)
        except BaseException:
            if len(self._models):
                self.runtime.attach(self._models, {}, needs_labels=False)
            raise
        self._models = models
        return swapped

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._remap_optimizer(optimizer)
        check_same_optimizers([optimizer], self._models)
        self._optimizers.append(optimizer)
        self.runtime.attach_clips(self._optimizers)
        self._run_state.track_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        """``None`` without data ranks: Fabric then keeps the sampler, as in one process."""
        if self.data_parallel_size == 1:
            return None
        return {"num_replicas": self.data_parallel_size, "rank": self.data_rank}

    @override
    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        # Fabric has set a seed by the global rank.
        self._loaders.seed_workers(dataloader, self.data_rank, overwrite=True)
        shared = self._loaders.share(super().process_dataloader(dataloader), self._trains)
        self._run_state.follow(shared)
        return FabricLoader(
            shared, self._loops, partial(_move_and_shard, self) if self._shard_dataloaders else None
        )

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(model.training for model in self._models)

    @property
    def run_state(self) -> RunState:
        """Random state of every rank and position of every loader, for ``fabric.save`` and ``load``."""
        self._run_state.device = self.root_device
        return self._run_state

    # -- a step, in the order of its data ------------------------------------------------------------------

    def shard_batch(self, batch: Any, *, training: bool | None = None) -> Any:
        """Begin a step: return this rank's part of a batch that every rank of its group holds whole.

        Args:
            batch: tensors in dicts, tuples, lists, named tuples or dataclasses, nested in any way. One on the
                host is read there, and only the part travels to the device: give
                ``fabric.setup_dataloaders`` ``move_to_device=False``, or the strategy
                ``shard_dataloaders=True``.
            training: True if the step calls ``backward``, which needs labels; by default, if gradients are
                enabled and a model is in training mode.

        Raises:
            ConfigError: a batch that cannot be read, or labels of unknown meaning.
            ShapeError: sequences that are too short, unequal, or (padding=False) do not divide.
            BatchMismatchError: ranks of a group hold different batches.
            RankFailure: another rank's batch was refused.
        """
        if training is None:
            training = self._trains()
        self._loops.begin_step()
        runtime = self.runtime
        if not runtime.is_sharded(batch):
            self._end_last_step()
        try:
            if training and runtime.enabled:
                runtime.binding.check_labels_declared()
                if not self._steps:
                    runtime.binding.check_trains()
            local = runtime.shard(batch, needs_labels=training, device=self.root_device)
        except UndeclaredError as error:
            asked = {"needs_labels": training, "batch": batch}
            raise collect_undeclared(error, self._models, {}, self._settings, **asked) from None
        if training:
            self._position.begin_micro_batch()
        runtime.begin_step()
        return local

    def check_parity(self, batch: Any, step: Callable[[Any], Any]) -> str:
        """Compare a step on one process with the same step context parallel, on ``parity_tokens`` tokens.

        Gradients, buffers, metrics and random state do not change.

        Args:
            batch: the whole batch.
            step: function that calls models that were set up, and returns the loss, without ``backward``.

        Returns:
            A line, which the first rank also prints.

        Raises:
            ParityError: on every rank, if they differ, with the likely cause.
            ConfigError: no model was set up, or a step that cannot be compared.
        """
        self._end_last_step()
        if self.runtime.enabled:
            self.runtime.binding.check_trains()
        with complete_errors(self._settings):
            return FabricParity(self.runtime, self.engine, self._models, self.precision).check(
                batch, step, partial(self._backward, module=None)
            )

    def _end_last_step(self) -> None:
        unused = self.runtime.step.is_unused and not self.runtime.step.is_left
        self.end_step()
        if unused:
            raise ConfigError(
                f"the batch before was sharded, and no model was called with it. {ONE_BATCH} Shard a batch "
                "before its forward: a forward belongs to the batch that was sharded last. To leave a batch "
                "out, call fabric.strategy.end_step() first."
            )

    def end_step(self) -> None:
        """End the step: the models are plain models until the next batch, for work of one rank.

        Raises:
            ConfigError: the models were called in the step, and no attention call was intercepted.
        """
        self._loops.end_step()

    @override
    def backward(
        self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Call backward on a loss, weighted by this rank's share of the targets.

        Raises:
            ConfigError: no batch was sharded, attention stayed local, the loss does not depend on the model,
                or backward would run through attention on some ranks only.
            NonFiniteError: the loss of a rank without targets is not finite, also scaled by 0.
            RankFailure: that happened on another rank.
        """
        if self.runtime.enabled and not self.runtime.in_step:
            raise ConfigError(
                "fabric.backward without a sharded batch, so the loss cannot be weighted. Begin every step "
                "with batch = fabric.strategy.shard_batch(batch), or let loaders do it: "
                "shard_dataloaders=True. Go backward before the step ends: with its loop over a loader, or "
                "when another strategy is set up or begins a step."
            )
        runtime, step = self.runtime, self.runtime.step
        try:
            self._check_frozen()
            runtime.check_step()
            step.check_connected(tensor)
            self._note_loss(tensor, self._optimizers)
            scaled = step.scale_loss(tensor, self._optimizers)
            self.engine.prepare_backward(scaled)
            self._backward(scaled, module, *args, **kwargs)
            step.after_backward(self._models.parameters())
        except BaseException:
            runtime.end_step()
            raise

    def _backward(self, loss: torch.Tensor, module: nn.Module | None, **kwargs: Any) -> None:
        self._position.enter(Phase.BACKWARD)
        super().backward(loss, module, **kwargs)

    def _check_frozen(self) -> None:
        left_out = self.engine.frozen_at_wrap(self._models)
        if left_out:
            raise ConfigError(
                f"{', '.join(left_out[:3])} ({len(left_out)} in all) were frozen when fabric.setup was "
                "called, and are trained now: DDP would leave their gradients different on every rank. "
                "Unfreeze before fabric.setup; what is to stay fixed for a while can be left out of the "
                "optimizer."
            )

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step with complete gradients.

        Raises:
            ConfigError: a trained parameter has no gradient, so that others were not averaged; or every
                backward of the window was within ``no_backward_sync``.
            NonFiniteError: on every rank, if a loss or gradient is not finite; nothing has changed.
        """
        closure = kwargs.get("closure")
        in_optimizer = ExitStack()  # an optimizer draws for parameters, not for tokens

        def finalize() -> None:
            self._finalize_gradients(optimizer)
            in_optimizer.enter_context(without_token_draws())

        def closure_then_finalize() -> Any:
            assert closure is not None
            in_optimizer.close()
            result = self.runtime.closure_value(closure, optimizer)
            finalize()
            return result

        if closure is None:
            finalize()
        else:
            kwargs["closure"] = closure_then_finalize
        with in_optimizer:
            self._position.enter(Phase.OPTIMIZER)
            stepped = super().optimizer_step(optimizer, **kwargs)
            self._position.end_step()
        self._steps += 1
        self._run_state.steps()
        self.engine.after_optimizer_step()
        self.runtime.records.recorder.end()
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
        self._finalize_gradients(optimizer)
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return self.engine.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        self._finalize_gradients(optimizer)
        self.precision.unscale_gradients(optimizer)
        self.engine.clip_value(self.precision.main_params(optimizer), clip_val)

    def _finalize_gradients(self, optimizer: Optimizer) -> None:
        """Complete the gradients of a window, once: averaged, weighted and checked.

        Raises:
            ConfigError: they are not averaged.
        """
        if self._vote.has_tested(optimizer):
            return
        try:
            self.engine.finish_backward()
            self._check_reduced(optimizer)
            self.runtime.end_window(optimizer)
            model = self._models[0] if len(self._models) == 1 else self._models
            self._check_finite(self._steps + 1, optimizer, model, self.precision)
        except LightningCPError:
            self.runtime.end_step()
            raise

    def _check_reduced(self, optimizer: Optimizer) -> None:
        kept = self.engine.count_unsynced(optimizer_parameters(optimizer))
        if kept:
            raise ConfigError(
                f"gradients of {kept} parameters of this {type(optimizer).__name__} were not averaged over "
                "ranks: their last backward was within fabric.no_backward_sync. Call backward of the last "
                "micro-batch of every window outside of it (enabled=False), which averages all of them; "
                "then clip, and step."
            )

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        group = self._group_of_sum(group, reduce_op)
        return super().all_reduce(integers_to_float64(tensor, reduce_op), group, reduce_op)

    def unshard_output(self, output: Any, dims: dict[str, int | None] | None = None) -> Any:
        """Return tensors of the current step, in any container, in original order and length, on every rank.

        Args:
            output: a model's output, or a container of outputs.
            dims: dotted name -> sequence dimension, ``None`` to keep a tensor; 1 for other tensors.

        Raises:
            ConfigError: a tensor without a sequence dimension that differs between ranks.
        """
        return self.runtime.step.unshard_output(output, dims or {})

    @property
    def should_stop(self) -> bool:
        """True if a rank has received SIGTERM; the same on all ranks, which share it at every step.

        Every rank reads it, after each step. From the first read on, SIGTERM does not end a process while
        this strategy exists. Once true, it stays true.
        """
        if self._vote.wish is None:
            self._vote.wish = record_sigterm(self).wish
        return self._vote.wishes > 0

    # -- checkpoints -----------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> Any:
        """The user's plugin, for full checkpoints; else ours."""
        if self._checkpoint_io is None:
            self.checkpoint_io = None  # ours
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: Any) -> None:
        from lightning_cp.checkpoint.manager import checked_io

        self._checkpoint_io = checked_io(io, self._settings.checkpoint)

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save modules, optimizers and other entries of ``state``; called on every rank.

        Raises:
            CheckpointError: on every rank: it cannot be written, ranks have different states, or a model's
                weights are not all there.
            ConfigError: ``state`` is not a dictionary.
        """
        with self._position.during(Phase.SAVE):
            convert = partial(
                self._convert_stateful_objects_in_state, state, filter=dict(filter or {})
            )
            place = (path, self._checkpoint_io, storage_options)
            self._checkpoints.save(state, self._models, convert, *place)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Verify a checkpoint and load it, all or nothing; called on every rank.

        Args:
            path: the checkpoint.
            state: a dictionary of objects to restore; one module or optimizer if the file is its state; or
                nothing, to return the whole checkpoint.
            strict: every key of ``state`` must be in the checkpoint, and names of modules must be the same.
            weights_only: ``False`` loads any object, which runs code of the file: only for files you trust.

        Returns:
            The entries that are not in ``state``. They are read on access, so that no rank must hold a
            whole model or optimizer.

        Raises:
            CheckpointError: on every rank: it is missing, damaged or does not fit; ``state`` is as it was.
        """
        with self._position.during(Phase.LOAD):
            place = (path, self._checkpoint_io, weights_only)
            return self._checkpoints.load(state, *place, strict=strict)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after the one that replaces it is complete; called on every rank."""
        self._manager.remove(filepath, self._checkpoint_io)

    @property
    def _position(self) -> Position:
        return self.runtime.watch.position


def _move_and_shard(strategy: Any, batch: Any) -> Any:
    if not strategy.runtime.enabled:  # otherwise only this rank's part travels
        batch = strategy.batch_to_device(batch)
    return strategy.shard_batch(batch)


class _LeaveOnRanks(_BackwardSyncControl):
    """``fabric.no_backward_sync`` of engines that shard."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy of the strategy makes one for its engine."""
        return {}

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._engine.accumulating(module) if enabled else nullcontext()
