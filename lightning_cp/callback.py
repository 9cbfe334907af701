"""ContextParallelCallback: where a batch is sharded, outputs are unsharded, and logs are averaged.

The strategy attaches one by itself. Subclass it and pass yours to the Trainer to change how batches
become shards; the hooks below are called by the strategy at the right moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_cp.errors import ConfigError
from lightning_cp.faults.position import Phase
from lightning_cp.faults.watch import Watch
from lightning_cp.logs.found import Ranks
from lightning_cp.logs.module import ModuleLog
from lightning_cp.logs.replicated import ReplicatedMetrics
from lightning_cp.mixin import options_of, refuse_deepspeed


class Core(Ranks, Protocol):
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
        """A copy is not connected: what belongs to a run stays with it."""
        return {**vars(self), "_core": None, "_log": None, "_replicated": None}

    def connect(self, core: Core) -> None:
        """Called by the strategy before anything else."""
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
        """The local part of a batch; override to shard containers of your own."""
        return self.core.shard(batch, needs_labels=needs_labels)

    def unshard_output(self, output: Any, dims: Mapping[str, int | None]) -> Any:
        """The outputs of ``predict_step`` in original order and length."""
        return self.core.unshard(output, dims)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a foreign strategy.

        Raises:
            ConfigError: the Trainer has another strategy.
        """
        refuse_deepspeed(trainer.strategy, "ContextParallelCallback")
        _ = self.core

    def watch(self, trainer: Trainer, module: LightningModule) -> None:
        """Called by the strategy once there is a mesh: the module logs what one process would.

        Raises:
            ConfigError: the module declares metrics that it does not have.
        """
        core, names = self.core, options_of(module).get("replicated_metrics", ())
        if core.enabled and self._log is None:
            self._replicated = ReplicatedMetrics(module, names, core.mesh)
            self._log = ModuleLog(trainer, module, core)

    def logging_together(self) -> AbstractContextManager[None]:
        """While a step function runs: what it logs becomes one value when it ends."""
        if self._log is None or not self.core.in_step:
            return nullcontext()
        return self._log.during_step()

    def note_loss(self, loss: torch.Tensor, show: Callable[[torch.Tensor], None]) -> None:
        """What a step returned, within ``logging_together``; ``show`` is told one process's value."""
        if self._log is not None:
            self._log.note_loss(loss, show)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module, and the Trainer's callbacks, as they were."""
        self._release()
        strategy: Any = trainer.strategy
        strategy.detach_callbacks(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Tell the other ranks of an error, and leave the module as it was then, too."""
        if self._core is not None:
            self._core.watch.note(exception)
            strategy: Any = trainer.strategy
            strategy.keep_from_saving(trainer)
        self._release()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Backward is over: the model is the plain model until the next batch."""
        self.core.watch.position.enter(Phase.BETWEEN_STEPS)
        self.core.end_step()
        self._begin_hook("on_train_batch_end")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """What is logged in this hook, and in the ones below, waits until all have had their turn."""
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
    """The one of a Trainer's callbacks, or a new one; put in front, so that others find values settled.

    Raises:
        ConfigError: there are several.
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
