"""The Trainer's strategy: DDPStrategy with a sequence dimension: one batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_cp.callback import ContextParallelCallback, callback_among
from lightning_cp.checkpoint.pretrained.meta_init import is_on_meta, is_sharded
from lightning_cp.consistency.model import require_same_model, require_same_optimizers
from lightning_cp.errors import ConfigError, UndeclaredError
from lightning_cp.launch.preemption import listen, listen_no_more
from lightning_cp.layout.axes import Flat
from lightning_cp.loaders.rng import going_on
from lightning_cp.loaders.synchronized import unshared
from lightning_cp.mixin import options_of
from lightning_cp.randomness.token_draws import without_token_draws
from lightning_cp.runtime.model_binding import adopted
from lightning_cp.runtime.runtime import in_floating_point
from lightning_cp.strategies.base import ContextParallelFront
from lightning_cp.strategies.lightning_patches import (
    STEPS,
    after_toggling,
    before_autograd,
    before_clipping,
    before_hooks_of_backward,
    before_hooks_of_batch,
    clip_by,
    leave_samplers_alone,
    place_of_profiles,
    refuse_averages,
    refuse_dataloader_iter,
)
from lightning_cp.strategies.parity_checks import TrainerParity
from lightning_cp.strategies.resume import ResumesExactly
from lightning_cp.strategies.saves_trainer import TrainerSaves
from lightning_cp.strategies.undeclared import asking_at_once, of_trainer
from lightning_cp.strategies.watch import WatchedTrainerSteps

# The Trainer's strategy before its first batch: processes, mesh, attention, model, loaders; and its end.


class TrainerSetup(
    WatchedTrainerSteps, ResumesExactly, TrainerSaves, ContextParallelFront, DDPStrategy
):
    """Methods that the Trainer calls before training and after it."""

    _callback: ContextParallelCallback | None = None
    _callback_is_given = False
    """The user's own, which stays with the Trainer."""
    _announced: weakref.ref[LightningModule] | None = None
    parity: TrainerParity

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": self._lightning_module}  # not as it is wrapped

    @override
    def set_world_ranks(self) -> None:
        self._check_ranks()  # called when the Trainer is made, before anything waits for a rank
        super().set_world_ranks()
        self._hide_library_warnings()

    @override
    def setup_environment(self) -> None:
        """Connect the processes and, if its sizes are known, make the mesh."""
        module = self.lightning_module
        # Without a Trainer somebody connects the processes alone.
        trainer = None if module is None else module._trainer
        if trainer is not None:
            self._attach_callback(trainer)
        self._check_launcher()
        with going_on():
            super().setup_environment()
        self._check_world()
        self._begin_watch(trainer)
        self._build_mesh()
        if self.data_parallel_size == 1 and trainer is not None:
            leave_samplers_alone(trainer)

    @override
    def setup(self, trainer: Trainer) -> None:
        """Swap attention, fix how batches are read and what is logged, and wrap the model."""
        module = self.lightning_module
        assert module is not None
        require_same_model(module)
        options = options_of(module)
        needs_labels = trainer.state.fn != TrainerFn.PREDICTING
        try:
            self._build_mesh(module, options.get("num_heads"))
            swapped = self._core.attach(module, options, needs_labels=needs_labels)
        except UndeclaredError as error:
            raise of_trainer(error, trainer, options, self._core.settings) from None
        if self._core.enabled:
            refuse_dataloader_iter(module)
        if trainer.state.fn == TrainerFn.FITTING:
            if self._engine.shards:
                refuse_averages(trainer, self._engine.name)
            self._core.check_trains()
        self.parity = TrainerParity(self._core, self._engine)
        self._guard.look = self.parity.before_step
        self._place_profiles(trainer)
        self._announce(module, swapped)
        self._watch_precision()
        listen(trainer, self._guard)
        self._guard.yield_to(trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        assert self._callback is not None
        self._callback.watch(trainer, module)
        self._adopt_callbacks(trainer)
        if self._engine.shards:
            self._setup_sharded(trainer)
        else:
            self._load_whole(module)
            super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._core.clip_for(self.optimizers)
            self._callback.watch(trainer, module)  # where nothing had to be watched without them

    def _setup_sharded(self, trainer: Trainer) -> None:
        """As DDPStrategy does it, but the engine places the model, which is sharded at every stage."""
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
                adopted(optimizer, self._engine.adopt)
        self.setup_precision_plugin()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        require_same_optimizers(self.optimizers, module, schedulers)

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init`` models are built without memory, for engines that fill each rank's part."""
        if not (empty_init and self._engine.shards):
            with super().tensor_init_context(empty_init):
                yield
            return
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def _setup_model(self, model: nn.Module) -> Any:
        return self._wrap(model)

    @override
    def _register_ddp_hooks(self) -> None:
        """Nothing: the engine has registered the hook, on every device, when it wrapped the model."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """A loader that all ranks go through together, its workers seeded by the data rank."""
        dataloader = unshared(dataloader)
        self._seed_workers(dataloader, overwrite=False)  # the Trainer has not set one yet
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        assert module is not None
        training, limit = bool(module.trainer.training), module.trainer.limit_train_batches
        at_most = limit if training and isinstance(limit, int) else None
        shared = self._share(dataloader, lambda: training, training=training, at_most=at_most)
        self._follow_loader(shared, training=training)
        return shared

    def _follow_what_is_trained(self) -> bool:
        """Wrap the model anew where layers were frozen or unfrozen since; whether they were."""
        module = self.lightning_module
        assert module is not None
        assert self.model is not None
        if self._engine.is_current(module):
            return False
        options = (self.mesh, self.root_device, self._ddp_options)
        self.model = self._engine.follow(self.model, *options)
        return True

    def _complete(self, optimizer: Optimizer) -> None:
        """Lightning divides each loss by the same number, also where an epoch ends within a window."""
        module = self.lightning_module
        assert module is not None
        divided = module.trainer.accumulate_grad_batches if module.automatic_optimization else None
        self._core.end_window(optimizer, divided)
        number = module.trainer.global_step + 1
        self._before_step(number, optimizer, module, self.precision_plugin)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on, weighted by this rank's share of the targets.

        Raises:
            ConfigError: backward would come through attention on some ranks only, or it is not known what
                the loss is a mean over.
        """
        assert self.lightning_module is not None
        automatic = self.lightning_module.automatic_optimization
        scaled = self._core.scale_loss(loss, self.optimizers, automatic=automatic)
        self.parity.after_loss(loss)
        return scaled

    def _watch_precision(self) -> None:
        """Come before the hooks of a batch; between hooks and autograd; and before gradients are clipped."""

        def follow(loss: torch.Tensor) -> None:
            assert self.model is not None
            if self._follow_what_is_trained():  # frozen or unfrozen in the step, or by a hook
                self._engine.rejoin(self.model, loss)
            elif self._engine.shards:
                self._engine.expect(loss)

        self._replaced.undo()
        before_hooks_of_batch(self._replaced, self.precision_plugin, self._begins_batch)
        before_hooks_of_backward(self._replaced, self.precision_plugin, self._scaled)
        before_autograd(self._replaced, self.precision_plugin, follow)
        before_clipping(self._replaced, self.precision_plugin, self._complete)
        if self._engine.shards:
            clip_by(self._replaced, self.precision_plugin, self._engine)
            after_toggling(self._replaced, self.lightning_module, self._follow_what_is_trained)

    @override
    def teardown(self) -> None:
        self._core.detach()
        if "parity" in vars(self):
            self.parity.forget()
        self._core.recorder.say_what_is_missing()
        self._replaced.undo()
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and trainer.interrupted:  # or else their own teardown follows
            self.detach_callbacks(trainer)
        refused = module is not None and (
            is_on_meta(module) or (self._whole and is_sharded(module))
        )
        if refused:  # nothing can be moved to the CPU
            self._replaced.replace(module, "cpu", lambda _: lambda: module)
        super().teardown()
        self._replaced.undo()
        self._library_warnings.show()

    # -- helpers ---------------------------------------------------------------------------------

    def _place_profiles(self, trainer: Trainer) -> None:
        """Where the Trainer logs, unless the user said where."""
        settings = self._core.settings
        if not settings.profiled_steps:
            return
        folder = place_of_profiles(trainer, settings.profile)
        if settings.profile_folder is None:
            self._core.recorder.folder = folder

    def _announce(self, module: LightningModule, swapped: list[str]) -> None:
        """Say once of each model, not at every stage, where its attention was swapped."""
        if swapped and (self._announced is None or self._announced() is not module):
            rank_zero_info(f"context parallel attention in: {', '.join(swapped)}")
            self._announced = weakref.ref(module)

    def _attach_callback(self, trainer: Any) -> None:
        callbacks: list[Any] = trainer.callbacks
        given = list(callbacks)
        self._callback = callback_among(callbacks)
        self._callback_is_given = self._callback in given
        self._callback.connect(self._core)

    def detach_callbacks(self, trainer: Any) -> None:
        """The run has ended: its callbacks are those of the user again, in a new list."""
        listen_no_more(trainer)
        if not self._callback_is_given:
            trainer.callbacks = [each for each in trainer.callbacks if each is not self._callback]


class UlyssesRingStrategy(TrainerSetup):
    __doc__ = ContextParallelFront.__doc__

    _made_for = "lightning.pytorch.Trainer; for Fabric take lightning_cp.fabric.UlyssesRingStrategy"

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """This rank's part of a batch, after the user's own transforms."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        module = self.lightning_module
        assert self._callback is not None
        assert module is not None
        training = module.trainer.training
        with asking_at_once(self._core.settings):
            if training:
                self.parity.before_batch(module, batch, self._callback)
            part = self._callback.shard_batch(batch, needs_labels=training)
        if training:
            self.parity.after_batch()
        return part

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step on this rank's tokens; callbacks read one process's loss."""
        self._follow_what_is_trained()
        self._core.begin_step()  # ends in on_train_batch_end: backward may recompute
        shown: list[torch.Tensor] = []
        with self._logging_together():
            output = super().training_step(*args, **kwargs)
            loss = self._loss_of(output)
            if loss is not None and self._callback is not None:
                self._callback.note_loss(loss, shown.append)
        if self._goes_backward:
            self._core.require_loss(loss)
            if output is None or (loss is not None and not shown):
                raise ConfigError(_SKIPPED)
        if loss is not None and shown:
            seen = self._core.shown_loss(loss, shown[0]) if self._goes_backward else shown[0]
            output = {**output, "loss": seen} if isinstance(output, Mapping) else seen
        self._core.check_step()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step(), self._logging_together():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step(), self._logging_together():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():  # predict_step may not log
            output = super().predict_step(*args, **kwargs)
        assert self._callback is not None
        dims = options_of(self.lightning_module).get("output_dims") or {}
        return self._callback.unshard_output(output, dims)

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        self._note_loss(closure_loss, self.optimizers)

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Look at what backward has brought.

        Raises:
            ConfigError: no gradient came to parameters that are trained.
            NonFiniteError: a rank without targets has a loss that cannot be made to add nothing.
            RankFailure: that happened on another rank.
        """
        assert self.model is not None
        self._engine.require_averaged()
        self._core.after_backward(self.model.parameters())
        super().post_backward(closure_loss)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step along gradients of their final size; see ``token_weighting``.

        Raises:
            NonFiniteError: on every rank, if some loss or gradient is not finite; nothing has changed.
        """

        after = ExitStack()  # an optimizer draws for parameters, not for tokens

        def to_the_end() -> Any:  # what reads gradients comes after it: hooks, clipping
            after.close()
            if not self._goes_backward or isinstance(optimizer, LBFGS):
                result = self._core.closure_value(closure, optimizer)
            else:
                result = closure()
            self._complete(optimizer)
            after.enter_context(without_token_draws())
            return result

        with after:
            stepped = super().optimizer_step(optimizer, to_the_end, model, **kwargs)
        self._engine.after_step()
        self._core.recorder.end()
        return stepped

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """A block whose gradients stay on their ranks until a later backward."""
        assert self.model is not None
        return self._engine.accumulating(self.model)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(group, Flat):
            group = self.mesh.group(group)
        if group is not None and group.size() == 1:
            return tensor  # what is logged without data parallelism
        group = self._counted_once(group, reduce_op)
        return super().reduce(in_floating_point(tensor, reduce_op), group, reduce_op)

    # -- helpers ---------------------------------------------------------------------------------

    @property
    def _goes_backward(self) -> bool:
        """Lightning takes the losses that steps return backward; in manual optimization steps did so."""
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization and self._core.enabled

    def _loss_of(self, output: Any) -> torch.Tensor | None:
        """The loss among what a step has returned, which callbacks are going to read."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        return loss if self._core.enabled and isinstance(loss, torch.Tensor) else None

    def _logging_together(self) -> AbstractContextManager[None]:
        assert self._callback is not None
        return self._callback.logging_together()

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._core.begin_step()
        try:
            yield
            self._core.check_step()
        finally:
            self._core.end_step()


_SKIPPED = (
    "training_step returned no loss (None) on some rank, none of one shape on all that share a sample, or on "
    "some ranks only one that is computed from the model (not torch.tensor(0.)). None skips a batch in one "
    "process only: ranks have to go through backward together. Leave such batches out in the dataset, or "
    "return a loss of which all labels are -100: it adds nothing."
)
