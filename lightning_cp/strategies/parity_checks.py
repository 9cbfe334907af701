"""Parity checks of the Trainer's and of Fabric's strategy: when they run, and on which batch and step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import wrappers
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_cp.comm.consensus import gather_objects
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.base import Engine
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.loss.counts import ASK
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.containers import tensors_of

if TYPE_CHECKING:
    from lightning_cp.parity.runner import Step

_log = logging.getLogger("lightning_cp")
_UNKNOWN_LOSS, _SHARED_VALUES = (
    "a loss is of no known kind",
    "ranks that share a sample share values",
)
"""Reasons to check a micro-batch by its loss; ``_check_window`` sorts them by the alphabet."""
_STEPS_TO_RECHECK = 2
"""Optimizer steps from the first check to the second: state of the step, or a phase, has begun by then."""
_HOW_TO_SKIP = "To train all the same: parity_check='off'."


@dataclass
class _CheckedBatch:
    """A whole batch before it is sharded, and its step."""

    module: Any
    batch: Any
    sharded_by: str
    """The user's class that overrides ``shard_batch``, or ""."""
    number: int
    """The ``batch_idx`` of its step."""


class TrainerParity:
    """The Trainer's parity checks: of the first and the third step, or of one in every n steps."""

    def __init__(self, runtime: ContextParallelRuntime, engine: Engine) -> None:
        self._runtime = runtime
        self._engine = engine
        self._checked_step: int | None = None
        """The optimizer step of the last check."""
        self._recheck_step: int | None = None
        """The optimizer step of the second check."""
        self.report: str | None = None
        """The line of the last check that passed."""
        self.skip_reason: str | None = None
        """The reason why there was no check."""
        self._pending_reason: str | None = None
        """The same until the batch is sharded: an error of sharding says more."""
        self._current: _CheckedBatch | None = None
        """The last batch, until its loss is known; ``None`` where no loss needs a check."""
        self._candidates: dict[int, _CheckedBatch] = {}
        """Batches of the window, by number, whose loss may need a check before the optimizer's step."""
        self._first_by_reason: dict[str, int] = {}
        """Number of the window's first batch for each reason to check."""
        self.is_on = runtime.settings.parity_check != "off"
        """Batches are looked at."""
        if not self.is_on:
            self._set_question(
                "leave parity_check='off' away, so that the step is compared with one process"
            )

    def before_batch(self, module: Any, batch: Any, sharded_by: str) -> None:
        """Check a training batch before it is sharded, if it is time to. Collective.

        Args:
            module: the user's.
            batch: whole.
            sharded_by: the user's class that overrides ``shard_batch``, or "".

        Raises:
            ParityError: on every rank, where the model does not compute what it computes in one process.
        """
        self._pending_reason = None
        # The loop counts the batch later.
        number = int(module.trainer.fit_loop.epoch_loop.batch_idx) + 1
        micro_batch = _CheckedBatch(module, batch, sharded_by, number)
        if self._is_due(module.trainer):
            self._check(micro_batch)
            if self._runtime.settings.parity_steps is None:
                self._recheck_step = module.trainer.global_step + _STEPS_TO_RECHECK
        elif self._is_due_again(module.trainer):
            self._check_again(micro_batch)
        if not self._runtime.losses.counts.are_asked:  # a window begins
            self.forget()
        self._current = micro_batch if self._runtime.losses.question is None else None

    def after_loss(self, loss: torch.Tensor) -> None:
        """Keep the batch of a loss for ``before_step``, if that may need it; called before its backward."""
        micro_batch, self._current = self._current, None
        if micro_batch is None:
            return
        counts = self._runtime.losses.counts
        reasons = {_UNKNOWN_LOSS: counts.asks, _SHARED_VALUES: counts.shares}
        found = {reason for reason, asks in reasons.items() if asks} - self._first_by_reason.keys()
        self._first_by_reason.update(dict.fromkeys(found, micro_batch.number))
        # A rank without targets takes part where others check.
        if found or self._runtime.step.local_loss(loss) is None:
            self._candidates[micro_batch.number] = micro_batch

    def before_step(self, why: str) -> None:
        """Check the run's first loss of no known kind, before the optimizer's step. Collective.

        Args:
            why: start of an error: the reason why its kind is not known.

        Raises:
            ParityError: on every rank, where the loss differs from one process's.
            ConfigError: the loss cannot be compared.
        """
        if self._runtime.losses.question is None:
            self._check_window()
        self.forget()
        if self._runtime.losses.question is not None:
            raise ConfigError(why + self._runtime.losses.question)

    def _check_window(self) -> None:
        """Check the first micro-batch of the window whose loss needs a check. Collective."""
        group = self._runtime.mesh.control_group(Flat.LOSS)
        common = set.intersection(*map(set, gather_objects(list(self._candidates), group)))
        every = gather_objects(list(self._first_by_reason.items()), group)
        due = sorted((reason, at) for each in every for reason, at in each if at in common)
        if not due:
            self._skip("ranks have losses of other kinds than each other in a batch")
            return
        before = self._runtime.losses.findings
        with self._runtime.between_steps(), torch.enable_grad():
            self._check(self._candidates[due[0][1]])
        if self._runtime.losses.question is None:
            counts = (
                self._runtime.losses.counts
            )  # as the run divides them, by accumulated batches too
            counts.clear |= {x for own in gather_objects(list(counts.in_doubt), group) for x in own}
        if self._runtime.losses.findings == before and self._runtime.losses.question is None:
            self._skip("run again for it, the step had a loss of a known kind, or declared it")

    def _check(self, micro_batch: _CheckedBatch) -> None:
        from lightning_cp.parity.runner import CannotRun

        module = micro_batch.module
        self._checked_step, self._recheck_step = module.trainer.global_step, None
        if not module.automatic_optimization:
            self._skip("with manual optimization a step changes the model, and cannot be run twice")
            return
        if micro_batch.sharded_by:
            self._skip(f"{micro_batch.sharded_by} overrides shard_batch")
            return
        try:
            self.report = self._compare(micro_batch)
        except CannotRun as why:
            self._skip(str(why))
            return
        self._runtime.losses.question = None
        rank_zero_info(self.report)

    def _check_again(self, micro_batch: _CheckedBatch) -> None:
        """Check once more, and print nothing; a check that cannot run leaves the first one valid."""
        from lightning_cp.parity.runner import CannotRun

        self._recheck_step = None
        with suppress(CannotRun):
            self._compare(micro_batch, prints=False)

    def _compare(self, micro_batch: _CheckedBatch, *, prints: bool = True) -> str:
        """Return the line about a model that passes."""
        from lightning_cp.parity.check import ParityCheck
        from lightning_cp.parity.runner import Runner, dtypes_of

        module = micro_batch.module
        plugin = module.trainer.precision_plugin
        dtypes = dtypes_of(str(plugin.precision), self._runtime.settings)
        step, wide = _make_step(micro_batch, plugin.train_step_context), None
        if dtypes and self._runtime.settings.mixed_precision is None:
            wide = _make_step(micro_batch, nullcontext)
        runner = Runner(self._runtime, self._engine, module, step, dtypes, wide)
        with _without_loggers(module.trainer):
            check = ParityCheck(runner, self._runtime.settings.parity_tokens, _HOW_TO_SKIP, prints)
            return check.run(_on_device(micro_batch.batch, module.trainer.strategy.root_device))

    def forget(self) -> None:
        """Forget the batches of a window, which is over."""
        self._current = None
        self._candidates, self._first_by_reason = {}, {}

    def after_batch(self) -> None:
        """Warn that there was no check, now that the batch is sharded."""
        why, self._pending_reason = self._pending_reason, None
        if why is not None and self._is_first_rank:
            _log.warning("parity_check was left out because %s", why)

    def _is_due(self, trainer: Any) -> bool:
        settings: StrategyConfig = self._runtime.settings
        if settings.parity_check == "off":
            return False
        if self._runtime.mesh.sample_size == 1:
            self.skip_reason = "no sample is shared between ranks"
            return False
        if self._is_within_window:
            return False
        every = settings.parity_steps
        if every is None or self._checked_step is None:
            return self._checked_step is None
        return trainer.global_step != self._checked_step and trainer.global_step % every == 0

    def _is_due_again(self, trainer: Any) -> bool:
        """True in the third step of a run that was checked in its first step, and not since."""
        due = self._recheck_step is not None and self.report is not None
        return due and trainer.global_step >= self._recheck_step and not self._is_within_window

    @property
    def _is_within_window(self) -> bool:
        """True if there are gradients of a window that has begun: the check waits for the next window."""
        return any(True for _ in self._engine.unreduced_gradients())

    def _skip(self, why: str) -> None:
        self.skip_reason = self._pending_reason = why
        self._set_question(
            f"let the parity check compare the step with one process (it was left out: {why})"
        )

    def _set_question(self, check: str) -> None:
        self._runtime.losses.question = ASK.format(owner="self", check=check)

    @property
    def _is_first_rank(self) -> bool:
        mesh = self._runtime.mesh
        return mesh.sample_rank == 0 and mesh.data_rank == 0


def _on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on the device; the strategy leaves it on the host where no hook moves it.

    One that a hook has moved stays as it is: Lightning cannot move every container.
    """
    is_there = any(x.device == device for _, x in tensors_of(batch))
    return batch if is_there else move_data_to_device(batch, device)


@contextmanager
def _without_loggers(trainer: Any) -> Iterator[None]:
    """A block in which a step writes to loggers and a profiler without effect, as in Lightning's tuner."""
    loggers, profiler = trainer.loggers, trainer.profiler
    trainer.loggers = [DummyLogger() for _ in loggers]
    trainer.profiler = PassThroughProfiler()
    try:
        yield
    finally:
        trainer.loggers, trainer.profiler = loggers, profiler


def _make_step(
    micro_batch: _CheckedBatch, context: Callable[[], AbstractContextManager[Any]]
) -> Step:
    """Return the user's ``training_step``, called as the Trainer calls it, within ``context``."""
    module, number = micro_batch.module, micro_batch.number
    takes_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def step(batch: Any) -> Any:
        with context():
            return (
                module.training_step(batch, number) if takes_number else module.training_step(batch)
            )

    return step


@dataclass
class FabricParity:
    """The parity check that a loop of Fabric calls: of a step of the models that were set up."""

    runtime: ContextParallelRuntime
    engine: Engine
    models: nn.ModuleList
    precision: Any

    def check(self, batch: Any, step: Step, backward: Callable[[torch.Tensor], Any]) -> str:
        """See ``UlyssesRingStrategy.check_parity``."""
        if not len(self.models):
            raise ConfigError(
                "check_parity compares a step of models that were set up, and there is none yet. Call "
                "fabric.setup(model, ...) first."
            )
        if self.runtime.mesh.sample_size == 1:
            self.runtime.losses.note_exact()
            line = "parity: no sample is shared between ranks, so there is nothing to compare"
            rank_zero_info(line)
            return line
        if any(True for _ in self.engine.unreduced_gradients()):
            raise ConfigError(
                "check_parity within a window of accumulation: gradients of its first batches are not "
                "reduced yet. Call it before a window."
            )
        from lightning_cp.parity.check import NotRepeatable, ParityCheck
        from lightning_cp.parity.runner import CannotRun, Runner, dtypes_of

        dtypes = dtypes_of(str(self.precision.precision), self.runtime.settings)
        runner = Runner(
            *(self.runtime, self.engine, self.models, step, dtypes),
            backward=partial(_backward_in_fabric, backward),
        )
        try:
            line = ParityCheck(runner, self.runtime.settings.parity_tokens).run(batch)
        except NotRepeatable as why:
            raise ConfigError(f"check_parity cannot compare this step: {why}.") from None
        except CannotRun as why:
            raise ConfigError(
                f"check_parity cannot compare this step: {why}. "
                "Pass the whole batch, and a step that returns its loss and calls no backward."
            ) from None
        self.runtime.losses.question = fabric_question(
            " (the loss that it has seen is another one)"
        )
        rank_zero_info(line)
        return line


def fabric_question(seen: str = "") -> str:
    """Return Fabric's message about a loss of no known kind; ``seen``: the result of an earlier check."""
    check = f"compare the step with one process by fabric.strategy.check_parity(batch, step){seen}"
    return ASK.format(owner="fabric.strategy", check=check)


def _backward_in_fabric(backward: Callable[[torch.Tensor], Any], loss: torch.Tensor) -> None:
    """Call ``backward`` as ``fabric.backward`` does: Fabric's modules refuse any other call."""
    assert hasattr(wrappers, "_in_fabric_backward")  # Lightning's own, and private
    wrappers._in_fabric_backward = True
    try:
        backward(loss)
    finally:
        wrappers._in_fabric_backward = False
