"""When a Trainer's batch is checked, and how its step is run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_cp.callback import ContextParallelCallback
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.arguments.settings import Settings
from lightning_cp.strategies.engines import Engine
from lightning_cp.strategies.parity.check import ParityCheck
from lightning_cp.strategies.parity.dtypes import dtypes_of
from lightning_cp.strategies.parity.runner import CannotRun, Runner, Step
from lightning_cp.strategies.step.core import ContextParallelCore
from lightning_cp.strategies.step.counts import ASK

_log = logging.getLogger("lightning_cp")
_WAY_ON = "To train all the same: parity_check='off'."


class TrainerParity:
    """Looks at whole batches before they are sharded; checks the first one, or one in every n steps."""

    def __init__(self, core: ContextParallelCore, engine: Engine) -> None:
        self._core = core
        self._engine = engine
        self._checked: int | None = None
        """The optimizer step that was checked last."""
        self.healthy: str | None = None
        """What the last check said."""
        self.left_out: str | None = None
        """Why it could not be made."""
        self._unsaid: str | None = None
        """The same, until the batch has been sharded: what refuses it says more."""
        self._whole: tuple[Any, Any, ContextParallelCallback] | None = None
        """The module, its last batch and who shards it, while a loss of no known kind may need a look."""
        if core.settings.parity_check == "off":
            self._ask(
                "leave parity_check='off' away, so that the step is compared with one process"
            )

    def before_batch(self, module: Any, batch: Any, callback: ContextParallelCallback) -> None:
        """All ranks come here with a batch that is about to be trained on, by ``callback`` sharded.

        Raises:
            ParityError: on every rank, where the model does not compute what it computes in one process.
        """
        self._unsaid = None
        if self._is_due(module.trainer):
            self._check(module, batch, callback)
        asks = self._core.ask_for_counts is None and self._core.cleared_zeros != 0
        self._whole = (module, batch, callback) if asks else None

    def before_step(self, why: str) -> None:
        """All ranks come here, before they step along a loss that is the run's first of no known kind.

        Args:
            why: it is of none, for an error.

        Raises:
            ParityError: on every rank, where the loss is not what it is in one process.
            ConfigError: it cannot be compared.
        """
        if self._core.ask_for_counts is None:
            assert self._whole is not None
            with self._core.between_steps(), torch.enable_grad():
                self._check(*self._whole)
            if self._core.cleared_zeros is None and self._core.ask_for_counts is None:
                self._leave_out("the step was run again for it, and had a loss of a known kind")
        self._whole = None
        if self._core.ask_for_counts is not None:
            raise ConfigError(why + self._core.ask_for_counts)

    def _check(self, module: Any, batch: Any, callback: ContextParallelCallback) -> None:
        self._checked = module.trainer.global_step
        if not module.automatic_optimization:
            self._leave_out(
                "with manual optimization a step changes the model, and cannot be run twice"
            )
            return
        if type(callback).shard_batch is not ContextParallelCallback.shard_batch:
            self._leave_out(f"{type(callback).__name__} overrides shard_batch")
            return
        plugin = module.trainer.precision_plugin
        dtypes = dtypes_of(str(plugin.precision), self._core.settings)
        step, wide = _step_of(module, plugin.train_step_context), None
        if dtypes and self._core.settings.mixed_precision is None:
            wide = _step_of(module, nullcontext)
        runner = Runner(self._core, self._engine, module, step, dtypes, wide)
        try:
            with _unwatched(module.trainer):
                check = ParityCheck(runner, self._core.settings.parity_tokens, _WAY_ON)
                self.healthy = check.run(batch)
        except CannotRun as why:
            self._leave_out(str(why))
            return
        self._core.ask_for_counts = None
        rank_zero_info(self.healthy)

    def forget(self) -> None:
        """The run is over: nothing of its last batch is kept."""
        self._whole = None

    def after_batch(self) -> None:
        """All ranks come here once the batch was sharded: why it was not checked is said now."""
        why, self._unsaid = self._unsaid, None
        if why is not None and self._is_first_rank:
            _log.warning("parity_check was left out because %s", why)

    def _is_due(self, trainer: Any) -> bool:
        settings: Settings = self._core.settings
        if settings.parity_check == "off":
            return False
        if self._core.mesh.sample_size == 1:
            self.left_out = "no sample is shared between ranks"  # and nothing need be said
            return False
        if any(True for _ in self._engine.unreduced()):
            return False  # gradients of a window that began before: the next one is as good
        every = settings.parity_steps
        if every is None or self._checked is None:
            return self._checked is None
        return trainer.global_step != self._checked and trainer.global_step % every == 0

    def _leave_out(self, why: str) -> None:
        self.left_out = self._unsaid = why
        self._ask(
            f"let the parity check compare the step with one process (it was left out: {why})"
        )

    def _ask(self, check: str) -> None:
        names = {"count": "self.count_targets", "unshard": "self.unshard"}
        self._core.ask_for_counts = ASK.format(**names, check=check)

    @property
    def _is_first_rank(self) -> bool:
        mesh = self._core.mesh
        return mesh.sample_rank == 0 and mesh.data_rank == 0


@contextmanager
def _unwatched(trainer: Any) -> Iterator[None]:
    """A step that writes to its loggers or profiler by itself writes to others, as in Lightning's tuner."""
    loggers, profiler = trainer.loggers, trainer.profiler
    trainer.loggers = [DummyLogger() for _ in loggers]
    trainer.profiler = PassThroughProfiler()
    try:
        yield
    finally:
        trainer.loggers, trainer.profiler = loggers, profiler


def _step_of(module: Any, context: Callable[[], AbstractContextManager[Any]]) -> Step:
    """The user's ``training_step``, called as the Trainer calls it, with autocast or without."""
    trainer = module.trainer
    number = max(0, int(trainer.fit_loop.epoch_loop.batch_idx))
    takes_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def step(batch: Any) -> Any:
        with context():
            return (
                module.training_step(batch, number) if takes_number else module.training_step(batch)
            )

    return step
