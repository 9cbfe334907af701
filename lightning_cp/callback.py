"""ContextParallelCallback: the end of steps and hooks, and a place to change the sharding of batches.

The strategy adds one to the Trainer. Subclass it and pass an instance to the Trainer to shard batches or to
unshard outputs in another way.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_cp.errors import ConfigError
from lightning_cp.logging.module_logger import RunLog
from lightning_cp.mixin import check_not_deepspeed
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.watchdog.phase import Phase


class ContextParallelCallback(Callback):
    """The callback of a run: it ends steps, and reduces the values that hooks log."""

    def __init__(self) -> None:
        self._runtime: ContextParallelRuntime | None = None
        self._log: RunLog | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which is not connected to a run."""
        return {**vars(self), "_runtime": None, "_log": None}

    def connect(self, runtime: ContextParallelRuntime, log: RunLog) -> None:
        """Connect to a strategy's run; the strategy calls this first."""
        self._runtime, self._log = runtime, log

    @property
    def runtime(self) -> ContextParallelRuntime:
        """The strategy's run.

        Raises:
            ConfigError: the Trainer has another strategy.
        """
        if self._runtime is None:
            raise ConfigError(
                "ContextParallelCallback needs the context-parallel strategy: "
                "Trainer(strategy='ulysses_ring'), or strategy=UlyssesRingStrategy(...)."
            )
        return self._runtime

    @property
    def core(self) -> ContextParallelRuntime:
        """The same under its old name."""
        warnings.warn(
            "ContextParallelCallback.core has a new name. Use ContextParallelCallback.runtime.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.runtime

    def shard_batch(self, batch: Any, *, needs_labels: bool) -> Any:
        """Return the local part of a batch; override it to shard custom containers."""
        return self.runtime.shard(batch, needs_labels=needs_labels)

    def unshard_output(self, output: Any, dims: Mapping[str, int | None]) -> Any:
        """Return the outputs of ``predict_step`` in original order and length."""
        return self.runtime.step.unshard_output(output, dims)

    @property
    def shards_batches(self) -> bool:
        """True if a subclass shards batches its own way."""
        return self._overrides("shard_batch")

    @property
    def unshards_outputs(self) -> bool:
        """True if a subclass unshards outputs its own way."""
        return self._overrides("unshard_output")

    def _overrides(self, method: str) -> bool:
        inherited = getattr(type(self), method) is getattr(ContextParallelCallback, method)
        return method in vars(self) or not inherited

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the strategy is the context-parallel one.

        Raises:
            ConfigError: the Trainer has another strategy.
        """
        check_not_deepspeed(trainer.strategy, "ContextParallelCallback")
        _ = self.runtime

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the module and the Trainer's callbacks."""
        self._release()
        strategy: Any = trainer.strategy
        strategy.detach_callbacks(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report an error to the other ranks, and restore the module."""
        if self._runtime is not None:
            self._runtime.watch.note(exception)
            strategy: Any = trainer.strategy
            if self._runtime.watch.failed:
                strategy.disable_saves(trainer)
        self._release()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """End the step: the model is the plain model until the next batch."""
        strategy: Any = trainer.strategy
        strategy.end_training_step()
        self._begin_hook("on_train_batch_end")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Begin a hook: values logged in it, or in the hooks below, are reduced after all callbacks ran."""
        self._begin_hook("on_validation_batch_end")

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._begin_hook("on_test_batch_end")

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        self.runtime.watch.position.enter(Phase.BETWEEN_STEPS)

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
        if self._runtime is not None:
            self._runtime.end_step()
        if self._log is not None:
            self._log.release()


def place_callback(callbacks: list[Any]) -> tuple[ContextParallelCallback, bool]:
    """Return the Trainer's ContextParallelCallback, or a new one, in front; and True if it is the user's.

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
    return callback, bool(found)
