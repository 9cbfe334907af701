"""UlyssesRingStrategy of the Trainer: every override of Lightning's DDPStrategy, in the order of a run.

``HOOK_ORDER`` is the order of components that act in the same hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_cp.callback import ContextParallelCallback, place_callback
from lightning_cp.consistency.model import check_same_model, check_same_optimizers
from lightning_cp.errors import ConfigError, UndeclaredError
from lightning_cp.launch.preemption import remove_stop_callback, replace_signal_handlers
from lightning_cp.launch.ranks import connect
from lightning_cp.launch.worker_results import reporting_launcher
from lightning_cp.layout.axes import Flat
from lightning_cp.loaders.rng import keep_random_state
from lightning_cp.loaders.shared_loader import unwrap_loader
from lightning_cp.logging.module_logger import RunLog
from lightning_cp.mixin import options_of
from lightning_cp.randomness.token_draws import without_token_draws
from lightning_cp.resume.trainer import TrainerResume
from lightning_cp.strategies.base import ContextParallelStrategy, integers_to_float64
from lightning_cp.strategies.declarations import collect_undeclared_of_trainer, complete_errors
from lightning_cp.strategies.lightning_patches import (
    STEPS,
    call_after_toggling,
    check_no_averages,
    check_no_dataloader_iter,
    clip_with_engine,
    device_of_hooks,
    keep_samplers,
    place_profiles,
    prevent_saves,
)
from lightning_cp.strategies.parity_checks import TrainerParity
from lightning_cp.utils.dtensor import is_on_meta, is_sharded
from lightning_cp.watchdog.phase import Phase

if TYPE_CHECKING:
    from lightning_cp.strategies.trainer_checkpoints import TrainerCheckpoints

HOOK_ORDER = ("watch", "resume", "checkpoints", "lightning")
"""Order of the components within a hook, on the way in; on the way out it is reversed."""


class UlyssesRingStrategy(ContextParallelStrategy, DDPStrategy):
    __doc__ = ContextParallelStrategy.__doc__

    _made_for = "lightning.pytorch.Trainer; for Fabric take lightning_cp.fabric.UlyssesRingStrategy"

    @override
    def _make_own_components(self) -> None:
        if self._checkpoint_io is not None:
            self.checkpoint_io = self._checkpoint_io  # checked
        self._resume = TrainerResume()
        self._log = RunLog(self.runtime)
        self._position = self.runtime.watch.position
        self.parity = TrainerParity(self.runtime, self.engine)
        self._callback = ContextParallelCallback()
        self._callback_is_given = False
        """True if the callback is the user's, which stays with the Trainer."""
        self._announced: weakref.ref[LightningModule] | None = None

    @cached_property
    def _checkpoints(self) -> TrainerCheckpoints:
        from lightning_cp.strategies.trainer_checkpoints import TrainerCheckpoints

        return TrainerCheckpoints(self._manager, self.engine, self.runtime)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": self._lightning_module}  # without its wrapper

    # -- processes -----------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = reporting_launcher(self._launcher)

    @override
    def set_world_ranks(self) -> None:
        self._check_ranks()  # called when the Trainer is made, before anything waits for a rank
        super().set_world_ranks()
        self._hide_library_warnings()

    def set_worker_rank(self) -> None:
        """Set the rank of a worker in Lightning, before it prints as the first rank."""
        self.set_world_ranks()

    @override
    def setup_environment(self) -> None:
        """Connect the processes, and make the mesh if its sizes are known."""
        module = self.lightning_module
        trainer = None if module is None else module._trainer  # None: only processes are connected
        if trainer is not None:
            self._attach_callback(trainer)
        self._check_launcher()
        with keep_random_state():
            super().setup_environment()
        self._check_world()
        self._begin_watch(self.precision_plugin, trainer)
        self._build_mesh()
        if self.data_parallel_size == 1 and trainer is not None:
            keep_samplers(trainer)

    @override
    def setup_distributed(self) -> None:
        connect(self)
        super().setup_distributed()

    # -- model, optimizers, loaders --------------------------------------------------------------------

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build models without memory with ``empty_init``, for engines that fill each rank's part."""
        if not (empty_init and self.engine.shards):
            with super().tensor_init_context(empty_init):
                yield
            return
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        """Swap attention, set the rules for batches and logs, and wrap the model."""
        module, fitting = self._module, trainer.state.fn == TrainerFn.FITTING
        check_same_model(module)
        swapped = self._bind(trainer, module)
        if self.runtime.enabled:
            check_no_dataloader_iter(module)
            if fitting:
                self.runtime.binding.check_trains()
        if fitting and self.engine.shards:
            check_no_averages(trainer, self.engine.name)
        self.parity = TrainerParity(self.runtime, self.engine)
        self._vote.look = self.parity.before_step
        place_profiles(trainer, self._settings, self.runtime.records.recorder)
        if swapped and (self._announced is None or self._announced() is not module):  # once a model
            rank_zero_info(f"context parallel attention in: {', '.join(swapped)}")
            self._announced = weakref.ref(module)
        self._patch_precision_plugin()
        replace_signal_handlers(trainer, self._vote, self._patches)
        self._vote.yield_to(trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        metrics = options_of(module).get("replicated_metrics", ())
        self._log.begin(trainer, module, metrics)
        self._checkpoints.adopt_callbacks(trainer)
        if self.engine.shards:
            self._setup_sharded(trainer)
        else:
            self._load_whole(module)
            super().setup(trainer)
        if fitting:
            self.runtime.attach_clips(self.optimizers)
            self._log.begin(trainer, module, metrics)  # for runs that only the clips enable

    def _bind(self, trainer: Trainer, module: LightningModule) -> list[str]:
        """Make the mesh, if it waits for the model, and bind the model; return lines about that."""
        options, needs_labels = options_of(module), trainer.state.fn != TrainerFn.PREDICTING
        try:
            self._build_mesh(module, options.get("num_heads"))
            return self.runtime.attach(module, options, needs_labels=needs_labels)
        except UndeclaredError as error:
            raise collect_undeclared_of_trainer(error, trainer, options, self._settings) from None

    def _setup_sharded(self, trainer: Trainer) -> None:
        """Set up as DDPStrategy does, but let the engine place the model, which is sharded at every stage."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.precision_plugin.convert_module(self.model)
        self.model = self._wrap(self.model, STEPS)
        if fitting:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self._remap_optimizer(optimizer)
        self.setup_precision_plugin()

    @override
    def _setup_model(self, model: nn.Module) -> Any:
        return self._wrap(model)

    @override
    def _register_ddp_hooks(self) -> None:
        """Do nothing: the engine registers the hook, on every device, when it wraps the model."""

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        check_same_optimizers(self.optimizers, self._module, schedulers)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number and rank of samples: ranks that share a sample draw the same one."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader that all ranks iterate together, with workers seeded by the data rank."""
        dataloader = unwrap_loader(dataloader)
        # The Trainer has not set a seed yet.
        self._loaders.seed_workers(dataloader, self.data_rank, overwrite=False)
        dataloader = super().process_dataloader(dataloader)
        trainer = self._module.trainer
        training, limit = bool(trainer.training), trainer.limit_train_batches
        at_most = limit if training and isinstance(limit, int) else None
        how: dict[str, Any] = {"training": training, "at_most": at_most}
        shared = self._loaders.share(dataloader, lambda: training, **how)
        self._resume.follow_loader(shared, trainer, self.runtime.meshes, self.global_rank)
        return shared

    # -- a step, in the order of its data ------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Return this rank's part of a batch, after the user's transforms; if possible it alone travels."""
        trainer, callback = self._module.trainer, self._callback
        checks, by_callback = trainer.training and self.parity.is_on, callback.shards_batches
        whole = by_callback or not self.runtime.enabled
        where = device if whole else device_of_hooks(batch, trainer, device)
        batch = super().batch_to_device(batch, where, dataloader_idx)
        with complete_errors(self._settings):
            if checks:
                self.parity.before_batch(self._module, batch, type(callback).__name__ * by_callback)
            there = {} if by_callback else {"device": device or self.root_device}
            shard: Any = callback.shard_batch if by_callback else self.runtime.shard
            part = shard(batch, needs_labels=trainer.training, **there)
        if checks and self.parity.is_on:
            self.parity.after_batch()
        return part

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step on this rank's tokens; callbacks read one process's loss."""
        runtime, module = self.runtime, self._module
        is_shared, is_automatic = runtime.enabled, module.automatic_optimization
        self._rewrap_if_requires_grad_changed()
        runtime.begin_step()
        shown: list[torch.Tensor] = []
        with self._log.during_step():
            counted = module.trainer.global_step if is_automatic else None
            self._position.begin_micro_batch(counted)
            output = super().training_step(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            loss = loss if is_shared and isinstance(loss, torch.Tensor) else None
            if loss is not None:
                self._log.note_loss(loss, shown.append)
        if is_shared and is_automatic:
            runtime.step.check_connected(loss)
            if output is None or (loss is not None and not shown):
                raise ConfigError(_SKIPPED)
        if loss is not None and shown:
            seen = runtime.step.global_loss(loss, shown[0]) if is_automatic else shown[0]
            output = {**output, "loss": seen} if isinstance(output, Mapping) else seen
        runtime.check_step()
        return output

    def end_training_step(self) -> None:
        """End the step after its backward, which may recompute; called before all on_train_batch_end."""
        self._position.enter(Phase.BETWEEN_STEPS)
        self.runtime.end_step()

    def _patch_precision_plugin(self) -> None:
        """Act before the hooks of a batch, between hooks and autograd, and before gradients are clipped."""
        patches, plugin = self._patches, self.precision_plugin
        patches.undo()
        for name, instead in (
            ("convert_input", self._convert_input),
            ("backward", self._backward),
            ("clip_gradients", self._clip_gradients),
        ):
            patches.replace(plugin, name, partial(partial, instead))  # called with the own method
        if self.engine.shards:
            clip_with_engine(patches, plugin, self.engine, self.runtime.meshes)
            call_after_toggling(patches, self._module, self._rewrap_if_requires_grad_changed)

    def _convert_input(self, own: Any, batch: Any) -> Any:
        """Note that a loop has read a batch, before its hooks."""
        trainer = self._module.trainer
        if trainer.training:
            self._resume.start_batch(trainer, self.root_device)
        return own(batch)

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Weight a loss by this rank's share of the targets, before hooks, and call backward.

        Raises:
            ConfigError: backward would run through attention on some ranks only, the targets of the loss are
                unknown, or trained parameters have no gradient.
            NonFiniteError: the loss of a rank without targets is not finite, also scaled by 0.
            RankFailure: that happened on another rank.
        """
        step, automatic = self.runtime.step, self._module.automatic_optimization
        self._position.enter(Phase.BACKWARD)
        self._note_loss(closure_loss, self.optimizers)
        scaled = step.scale_loss(closure_loss, self.optimizers, automatic=automatic)
        if self.parity.is_on:
            self.parity.after_loss(closure_loss)
        shown = super().backward(scaled, *args, **kwargs)
        assert self.model is not None
        self.engine.finish_backward()
        step.after_backward(self.model.parameters())
        return shown

    def _backward(self, own: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Prepare the engine between the hooks of backward and autograd, where Lightning has no hook."""
        assert self.model is not None
        if self._rewrap_if_requires_grad_changed():  # in the step, or by a hook
            self.engine.prepare_backward_after_rewrap(self.model, loss)
        elif self.engine.shards:
            self.engine.prepare_backward(loss)
        own(loss, *args, **kwargs)

    def _rewrap_if_requires_grad_changed(self) -> bool:
        """Wrap the model again and return True if layers were frozen or unfrozen since the last wrap."""
        assert self.model is not None
        if self.engine.is_current(self._module):
            return False
        options = (self.mesh, self.root_device, self._ddp_options)
        self.model = self.engine.rewrap(self.model, *options)
        return True

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """A block whose gradients stay on their ranks until a later backward."""
        assert self.model is not None
        return self.engine.accumulating(self.model)

    def _clip_gradients(self, own: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Complete gradients before they are clipped by hand; before Lightning clips, they are."""
        is_wrapped = isinstance(optimizer, LightningOptimizer)
        self._finalize_gradients(optimizer.optimizer if is_wrapped else optimizer)
        own(optimizer, *args, **kwargs)

    def _finalize_gradients(self, optimizer: Optimizer) -> None:
        """Complete the gradients of a window, and check them; once, before hooks and clipping read them."""
        if self._vote.has_tested(optimizer):
            return
        module = self._module
        # Lightning divides each loss by the same number, also in a shorter window at an epoch's end.
        divided = module.trainer.accumulate_grad_batches if module.automatic_optimization else None
        self.runtime.end_window(optimizer, divided)
        self._check_finite(module.trainer.global_step + 1, optimizer, module, self.precision_plugin)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step with complete gradients; see ``token_weighting``.

        Raises:
            NonFiniteError: on every rank, if a loss or gradient is not finite; nothing has changed.
        """
        in_optimizer = ExitStack()  # an optimizer draws for parameters, not for tokens

        def closure_then_finalize() -> Any:
            in_optimizer.close()
            goes_backward = self._module.automatic_optimization and self.runtime.enabled
            if not goes_backward or isinstance(optimizer, LBFGS):
                result = self.runtime.closure_value(closure, optimizer)
            else:
                result = closure()
            self._finalize_gradients(optimizer)
            in_optimizer.enter_context(without_token_draws())
            self._position.enter(Phase.OPTIMIZER)
            return result

        with in_optimizer:
            stepped = super().optimizer_step(optimizer, closure_then_finalize, model, **kwargs)
            self._resume.steps()
            self._position.end_step()
        self.engine.after_optimizer_step()
        self.runtime.records.recorder.end()
        return stepped

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(group, Flat):
            group = self.runtime.meshes.mesh.group(group)
        if group is not None and group.size() == 1:
            return tensor  # logged values without data parallelism
        group = self._group_of_sum(group, reduce_op)
        return super().reduce(integers_to_float64(tensor, reduce_op), group, reduce_op)

    # -- evaluation and prediction -----------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step(Phase.VALIDATION), self._log.during_step():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step(Phase.TEST), self._log.during_step():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step(Phase.PREDICTION):  # predict_step may not log
            output = super().predict_step(*args, **kwargs)
        dims = options_of(self._module).get("output_dims") or {}
        if self._callback.unshards_outputs:
            return self._callback.unshard_output(output, dims)
        return self.runtime.step.unshard_output(output, dims)

    @contextmanager
    def _evaluation_step(self, phase: Phase) -> Iterator[None]:
        self.runtime.begin_step()
        try:
            self._position.enter(phase)
            yield
            self.runtime.check_step()
        finally:
            self.runtime.end_step()

    # -- checkpoints; see HOOK_ORDER -----------------------------------------------------------------------

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

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._checkpoints.loads_after_setup

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save the Trainer's state; called on every rank, or without ranks before and after a run.

        Raises:
            CheckpointError: on every rank: it cannot be written; or this rank ends with an error, so that the
                others will not take part.
        """
        module, meshes = self._module, self.runtime.meshes
        with self._position.during(Phase.SAVE):
            checkpoint = {**checkpoint}  # hooks have seen the other dictionary
            if module._trainer is not None and meshes.sizes:
                self._resume.add_to_checkpoint(
                    checkpoint, module._trainer, meshes, self.root_device
                )
            if not dist.is_initialized() and not self.is_global_zero:
                return  # ranks do not know each other yet, and would all write the file
            place = (filepath, self._checkpoint_io, storage_options)
            self._checkpoints.save(checkpoint, module, self.optimizers, *place)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify a checkpoint and read it; in ``fit`` the run continues where it was saved.

        Args:
            checkpoint_path: the checkpoint.
            weights_only: ``False`` loads any object, which runs code of the file: only for files you trust.

        Raises:
            CheckpointError: on every rank: it is missing, damaged or not a checkpoint.
        """
        module = self.lightning_module
        with self._position.during(Phase.LOAD):
            place = (checkpoint_path, self._checkpoint_io, weights_only)
            checkpoint = self._checkpoints.read(module, self.optimizers, *place)
            if module is not None and module._trainer is not None:
                self._resume.load_from(checkpoint, module._trainer)
            return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        precision = self.precision_plugin.precision
        self._checkpoints.load_model(
            checkpoint, self._module, self.optimizers, precision, strict=strict
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(checkpoint, self._module, self.optimizers)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after the one that replaces it is complete; called on every rank."""
        self._manager.remove(filepath, self._checkpoint_io)

    # -- begin and end of loops, and of the run ------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._checkpoints.begin_training()
        self._resume.start_training(self._module.trainer, self.root_device)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._resume.end_validation()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._checkpoints.end_training()

    def disable_saves(self, trainer: Trainer) -> None:
        """Prevent saves until the Trainer's teardown: after an error other ranks would not take part."""
        prevent_saves(self._patches, trainer)

    def detach_callbacks(self, trainer: Any) -> None:
        """Restore the user's callbacks in the Trainer, in a new list, at the end of a run."""
        remove_stop_callback(trainer)
        if not self._callback_is_given:
            trainer.callbacks = [each for each in trainer.callbacks if each is not self._callback]

    @override
    def teardown(self) -> None:
        self.runtime.detach()
        self.parity.forget()
        self.runtime.records.recorder.say_what_is_missing()
        self._patches.undo()
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and trainer.interrupted:  # else the teardown of callbacks follows
            self.detach_callbacks(trainer)
        if module is not None and (is_on_meta(module) or is_sharded(module)):
            # Lightning would move the module to the CPU: parts on meta cannot go, and shards are needed on
            # their device by the next stage and by whoever gathers them.
            self._patches.replace(module, "cpu", lambda _: lambda: module)
        self._log.release()
        self.runtime.end_watch()
        if "_checkpoints" in vars(self):
            self._checkpoints.teardown()
        super().teardown()
        self._patches.undo()
        self._library_warnings.show()

    # -- helpers ---------------------------------------------------------------------------------------

    @property
    def _module(self) -> LightningModule:
        """The user's module, set by the Trainer."""
        assert self.lightning_module is not None
        return self.lightning_module

    def _attach_callback(self, trainer: Any) -> None:
        self._callback, self._callback_is_given = place_callback(trainer.callbacks)
        self._callback.connect(self.runtime, self._log)


_SKIPPED = (
    "training_step returned no loss (None) on some rank, none of one shape on all that share a sample, or on "
    "some ranks only one that is computed from the model (not torch.tensor(0.)). None skips a batch in one "
    "process only: ranks have to go through backward together. Leave such batches out in the dataset, or "
    "return a loss of which all labels are -100: it adds nothing."
)
