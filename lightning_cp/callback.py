"""ContextParallelCallback: shards batches, unshards outputs, and averages logged values.

The strategy attaches one automatically and calls its hooks. Subclass it and pass an instance to the Trainer
to change the sharding of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_cp.errors import ConfigError
from lightning_cp.logging.metrics import ReplicatedMetrics
from lightning_cp.logging.module_logger import ModuleLog
from lightning_cp.logging.pending import StepRanks
from lightning_cp.mixin import options_of, refuse_deepspeed
from lightning_cp.watchdog.phase import Phase
from lightning_cp.watchdog.watch import Watch


class Core(StepRanks, Protocol):
    """The part of the strategy's core that the callback needs."""

    @property
    def in_step(self) -> bool: ...
    @property
    def enabled(self) -> bool: ...
    @property
    def watch(self) -> Watch: ...
    def shard(self, batch: Any, *, needs_labels: bool) -> Any: ...
    def unshard(self, output: Any, dims: Mapping[str, int | None]) -> Any: ...
    def end_step(self) -> None: ...


class ContextParallelCallback(Callback):
    """Shards batches, unshards predictions, and makes ``self.log`` show what one process would log."""

    def __init__(self) -> None:
        self._core: Core | None = None
        self._log: ModuleLog | None = None
        self._replicated: ReplicatedMetrics | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which is not connected to a run."""
        return {**vars(self), "_core": None, "_log": None, "_replicated": None}

    def connect(self, core: Core) -> None:
        """Connect to the strategy's core; the strategy calls this first."""
        self._core = core

    @property
    def core(self) -> Core:
        """The strategy's core.

        Raises:
            ConfigError: the Trainer has another strategy.
        """
        if self._core is None:
            raise ConfigError(
                "ContextParallelCallback needs the context-parallel strategy: "
                "Trainer(strategy='ulysses_ring'), or strategy=UlyssesRingStrategy(...)."
            )
        return self._core

    def shard_batch(self, batch: Any, *, needs_labels: bool) -> Any:
        """Return the local part of a batch; override it to shard custom containers."""
        return self.core.shard(batch, needs_labels=needs_labels)

    def unshard_output(self, output: Any, dims: Mapping[str, int | None]) -> Any:
        """Return the outputs of ``predict_step`` in original order and length."""
        return self.core.unshard(output, dims)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the strategy is the context-parallel one.

        Raises:
            ConfigError: the Trainer has another strategy.
        """
        refuse_deepspeed(trainer.strategy, "ContextParallelCallback")
        _ = self.core

    def watch(self, trainer: Trainer, module: LightningModule) -> None:
        """Make the module log the values of one process; the strategy calls this once the mesh exists.

        Raises:
            ConfigError: the module declares metrics that it does not have.
        """
        core, names = self.core, options_of(module).get("replicated_metrics", ())
        if core.enabled and self._log is None:
            self._replicated = ReplicatedMetrics(module, names, core.mesh)
            self._log = ModuleLog(trainer, module, core)

    def logging_together(self) -> AbstractContextManager[None]:
        """Return a context for a step function: its logged values are reduced to one when it ends."""
        if self._log is None or not self.core.in_step:
            return nullcontext()
        return self._log.during_step()

    def note_loss(self, loss: torch.Tensor, show: Callable[[torch.Tensor], None]) -> None:
        """Note a step's loss inside ``logging_together``; ``show`` receives the value of one process."""
        if self._log is not None:
            self._log.note_loss(loss, show)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the module and the Trainer's callbacks."""
        self._release()
        strategy: Any = trainer.strategy
        strategy.detach_callbacks(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report an error to the other ranks, and restore the module."""
        if self._core is not None:
            self._core.watch.note(exception)
            strategy: Any = trainer.strategy
            strategy.keep_from_saving(trainer)
        self._release()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """End the step: the model is the plain model until the next batch."""
        self.core.watch.position.enter(Phase.BETWEEN_STEPS)
        self.core.end_step()
        self._begin_hook("on_train_batch_end")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Begin a hook: values logged in it, or in the hooks below, are reduced after all callbacks ran."""
        self._begin_hook("on_validation_batch_end")

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._begin_hook("on_test_batch_end")

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        self.core.watch.position.enter(Phase.BETWEEN_STEPS)

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._begin_hook("on_train_epoch_end")

    def on_validation_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._begin_hook("on_validation_epoch_end")

    def on_test_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._begin_hook("on_test_epoch_end")

    def _begin_hook(self, hook: str) -> None:
        if self._log is not None:
            self._log.begin_hook(hook)

    def _release(self) -> None:
        if self._core is not None:
            self._core.end_step()
        if self._log is not None:
            self._log.release()
        if self._replicated is not None:
            self._replicated.release()
        self._log = self._replicated = None


def callback_among(callbacks: list[Any]) -> ContextParallelCallback:
    """Return the Trainer's ContextParallelCallback, or a new one, and move it to the front.

    In front, it reduces values before other callbacks read them.

    Raises:
        ConfigError: the Trainer has several.
    """
    found = [callback for callback in callbacks if isinstance(callback, ContextParallelCallback)]
    if len(found) > 1:
        raise ConfigError(
            f"the Trainer has {len(found)} ContextParallelCallbacks; pass at most one (the strategy adds one "
            "by itself)."
        )
    callback = found[0] if found else ContextParallelCallback()
    if found:
        callbacks.remove(callback)
    callbacks.insert(0, callback)
    return callback
