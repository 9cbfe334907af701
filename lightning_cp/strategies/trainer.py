"""The Trainer's strategy: DDPStrategy with a sequence dimension: one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_cp.errors import ConfigError
from lightning_cp.mesh import Flat
from lightning_cp.mixin import options_of
from lightning_cp.models.token_draws import as_ever
from lightning_cp.strategies.front import ContextParallelFront
from lightning_cp.strategies.step.reduced import in_floating_point
from lightning_cp.strategies.trainer_setup import TrainerSetup
from lightning_cp.strategies.undeclared import asking_at_once


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
            after.enter_context(as_ever())
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
