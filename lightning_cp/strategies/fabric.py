"""Fabric's strategy: DDPStrategy with a sequence dimension, for loops that the user writes: one batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.errors import ConfigError, LightningCPError, UndeclaredError
from lightning_cp.models.step_state import ONE_BATCH
from lightning_cp.models.token_draws import as_ever
from lightning_cp.strategies.fabric_setup import FabricSetup
from lightning_cp.strategies.parity.fabric import FabricParity
from lightning_cp.strategies.step.reduced import in_floating_point
from lightning_cp.strategies.undeclared import asking_at_once, of_run


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
            after.enter_context(as_ever())  # an optimizer draws for parameters, not for tokens

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
