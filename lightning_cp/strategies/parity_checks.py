"""When a Trainer's batch is checked, and how its step is run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.fabric import wrappers
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_cp.comm.consensus import gather_lists
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.base import Engine
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.loss.counts import ASK
from lightning_cp.parity.check import NotRepeatable, ParityCheck
from lightning_cp.parity.runner import CannotRun, Runner, Step, dtypes_of
from lightning_cp.runtime.runtime import ContextParallelRuntime

_log = logging.getLogger("lightning_cp")
_UNKNOWN, _SHARED = "a loss is of no known kind", "ranks that share a sample share values"
"""Why a micro-batch may need a look: in the order of the alphabet, which ``_look`` takes."""
_AGAIN = 2
"""Steps after the first check, before the next one: a step's own state has begun by then, or a phase."""
_WAY_ON = "To train all the same: parity_check='off'."


@dataclass
class _CheckedBatch:
    """A whole batch, as it would be sharded, and its step."""

    module: Any
    batch: Any
    sharded_by: str
    """Class of the user's that shards batches its own way, or ""."""
    number: int
    """The ``batch_idx`` of its step."""


class TrainerParity:
    """Looks at whole batches before they are sharded; checks the first one and one of the third step, or one
    in every n steps."""

    def __init__(self, runtime: ContextParallelRuntime, engine: Engine) -> None:
        self._runtime = runtime
        self._engine = engine
        self._checked: int | None = None
        """The optimizer step that was checked last."""
        self._again: int | None = None
        """The one that is checked once more."""
        self.healthy: str | None = None
        """What the last check said."""
        self.left_out: str | None = None
        """Why it could not be made."""
        self._unsaid: str | None = None
        """The same, until the batch has been sharded: what refuses it says more."""
        self._current: _CheckedBatch | None = None
        """The last one, until its loss is known; ``None`` where no loss needs a look."""
        self._kept: dict[int, _CheckedBatch] = {}
        """Of the window: those whose loss may need a look before the optimizer's step, by number."""
        self._wanted: dict[str, int] = {}
        """The first one of the window for each reason of a look."""
        if runtime.settings.parity_check == "off":
            self._ask(
                "leave parity_check='off' away, so that the step is compared with one process"
            )

    def before_batch(self, module: Any, batch: Any, sharded_by: str) -> None:
        """All ranks come here with a batch that is about to be trained on.

        Args:
            module: the user's.
            batch: whole.
            sharded_by: class of the user's that shards batches its own way, or "".

        Raises:
            ParityError: on every rank, where the model does not compute what it computes in one process.
        """
        self._unsaid = None
        number = (
            int(module.trainer.fit_loop.epoch_loop.batch_idx) + 1
        )  # the loop counts it afterwards
        micro_batch = _CheckedBatch(module, batch, sharded_by, number)
        if self._is_due(module.trainer):
            self._check(micro_batch)
            if self._runtime.settings.parity_steps is None:
                self._again = module.trainer.global_step + _AGAIN
        elif self._is_due_again(module.trainer):
            self._check_again(micro_batch)
        if not self._runtime.losses.counts.are_asked:  # a window begins
            self.forget()
        self._current = micro_batch if self._runtime.losses.question is None else None

    def after_loss(self, loss: torch.Tensor) -> None:
        """A loss is about to go backward: its batch is kept for ``before_step``, if that may need it."""
        micro_batch, self._current = self._current, None
        if micro_batch is None:
            return
        counts = self._runtime.losses.counts
        reasons = {_UNKNOWN: counts.asks, _SHARED: counts.shares}
        found = [reason for reason, asks in reasons.items() if asks and reason not in self._wanted]
        self._wanted.update(dict.fromkeys(found, micro_batch.number))
        if (
            found or self._runtime.step.own_loss(loss) is None
        ):  # without targets: as other ranks have it
            self._kept[micro_batch.number] = micro_batch

    def before_step(self, why: str) -> None:
        """All ranks come here, before they step along a loss that is the run's first of no known kind.

        Args:
            why: it is of none, for an error.

        Raises:
            ParityError: on every rank, where the loss is not what it is in one process.
            ConfigError: it cannot be compared.
        """
        if self._runtime.losses.question is None:
            self._look()
        self.forget()
        if self._runtime.losses.question is not None:
            raise ConfigError(why + self._runtime.losses.question)

    def _look(self) -> None:
        """Check the first micro-batch of the window whose loss needs it. Collective."""
        group = self._runtime.mesh.control_group(Flat.LOSS)
        kept = set.intersection(*map(set, gather_lists(list(self._kept), group)))
        every = gather_lists(list(self._wanted.items()), group)
        wanted = sorted((reason, at) for each in every for reason, at in each if at in kept)
        if not wanted:
            self._leave_out("ranks have losses of other kinds than each other in a batch")
            return
        before = set(self._runtime.losses.exact_zeros), self._runtime.losses.follows_factors
        with self._runtime.between_steps(), torch.enable_grad():
            self._check(self._kept[wanted[0][1]])
        found = self._runtime.losses.exact_zeros, self._runtime.losses.follows_factors
        if found == before and self._runtime.losses.question is None:
            self._leave_out("run again for it, the step had a loss of a known kind, or declared it")

    def _check(self, micro_batch: _CheckedBatch) -> None:
        module = micro_batch.module
        self._checked, self._again = module.trainer.global_step, None
        if not module.automatic_optimization:
            self._leave_out(
                "with manual optimization a step changes the model, and cannot be run twice"
            )
            return
        if micro_batch.sharded_by:
            self._leave_out(f"{micro_batch.sharded_by} overrides shard_batch")
            return
        try:
            self.healthy = self._compare(micro_batch)
        except CannotRun as why:
            self._leave_out(str(why))
            return
        self._runtime.losses.question = None
        rank_zero_info(self.healthy)

    def _check_again(self, micro_batch: _CheckedBatch) -> None:
        """Say nothing but an error; where it cannot be made, the first one holds."""
        self._again = None
        with suppress(CannotRun):
            self._compare(micro_batch, says=False)

    def _compare(self, micro_batch: _CheckedBatch, *, says: bool = True) -> str:
        """The line about a model that is well."""
        module = micro_batch.module
        plugin = module.trainer.precision_plugin
        dtypes = dtypes_of(str(plugin.precision), self._runtime.settings)
        step, wide = _step_of(micro_batch, plugin.train_step_context), None
        if dtypes and self._runtime.settings.mixed_precision is None:
            wide = _step_of(micro_batch, nullcontext)
        runner = Runner(self._runtime, self._engine, module, step, dtypes, wide)
        with _unwatched(module.trainer):
            check = ParityCheck(runner, self._runtime.settings.parity_tokens, _WAY_ON, says)
            return check.run(micro_batch.batch)

    def forget(self) -> None:
        """A window is over: nothing of its batches is kept."""
        self._current = None
        self._kept, self._wanted = {}, {}

    def after_batch(self) -> None:
        """All ranks come here once the batch was sharded: why it was not checked is said now."""
        why, self._unsaid = self._unsaid, None
        if why is not None and self._is_first_rank:
            _log.warning("parity_check was left out because %s", why)

    def _is_due(self, trainer: Any) -> bool:
        settings: StrategyConfig = self._runtime.settings
        if settings.parity_check == "off":
            return False
        if self._runtime.mesh.sample_size == 1:
            self.left_out = "no sample is shared between ranks"  # and nothing need be said
            return False
        if self._is_within_window:
            return False
        every = settings.parity_steps
        if every is None or self._checked is None:
            return self._checked is None
        return trainer.global_step != self._checked and trainer.global_step % every == 0

    def _is_due_again(self, trainer: Any) -> bool:
        """True in the third step of a run whose first one was checked, and no later one since."""
        due = self._again is not None and self.healthy is not None
        return due and trainer.global_step >= self._again and not self._is_within_window

    @property
    def _is_within_window(self) -> bool:
        """Gradients of a window that began before are left alone: the next one is as good."""
        return any(True for _ in self._engine.unreduced())

    def _leave_out(self, why: str) -> None:
        self.left_out = self._unsaid = why
        self._ask(
            f"let the parity check compare the step with one process (it was left out: {why})"
        )

    def _ask(self, check: str) -> None:
        names = {"count": "self.count_targets", "unshard": "self.unshard"}
        self._runtime.losses.question = ASK.format(**names, check=check)

    @property
    def _is_first_rank(self) -> bool:
        mesh = self._runtime.mesh
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


def _step_of(
    micro_batch: _CheckedBatch, context: Callable[[], AbstractContextManager[Any]]
) -> Step:
    """The user's ``training_step``, called as the Trainer calls it, with autocast or without."""
    module, number = micro_batch.module, micro_batch.number
    takes_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def step(batch: Any) -> Any:
        with context():
            return (
                module.training_step(batch, number) if takes_number else module.training_step(batch)
            )

    return step


# The check of a step in a loop of Fabric, which calls it by hand.


@dataclass
class FabricParity:
    """Of the models that were set up."""

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
            return self._told(
                "parity: no sample is shared between ranks, so there is nothing to compare"
            )
        if any(True for _ in self.engine.unreduced()):
            raise ConfigError(
                "check_parity within a window of accumulation: gradients of its first batches are not "
                "reduced yet. Call it before a window."
            )
        dtypes = dtypes_of(str(self.precision.precision), self.runtime.settings)
        runner = Runner(
            *(self.runtime, self.engine, self.models, step, dtypes),
            backward=partial(_as_fabric_does, backward),
        )
        try:
            line = self._told(ParityCheck(runner, self.runtime.settings.parity_tokens).run(batch))
        except NotRepeatable as why:
            raise ConfigError(f"check_parity cannot compare this step: {why}.") from None
        except CannotRun as why:
            raise ConfigError(
                f"check_parity cannot compare this step: {why}. "
                "Pass the whole batch, and a step that returns its loss and calls no backward."
            ) from None
        self.runtime.losses.question = asked_in_fabric(
            " (the loss that it has seen is another one)"
        )
        return line

    def _told(self, line: str) -> str:
        rank_zero_info(line)
        return line


def asked_in_fabric(seen: str = "") -> str:
    """What to say of a loss of no known kind; ``seen``: what a check has seen until now."""
    check = f"compare the step with one process by fabric.strategy.check_parity(batch, step){seen}"
    names = {"count": "fabric.strategy.count_targets", "unshard": "fabric.strategy.unshard"}
    return ASK.format(**names, check=check)


def _as_fabric_does(backward: Callable[[torch.Tensor], Any], loss: torch.Tensor) -> None:
    """Its modules refuse a backward that did not come through ``fabric.backward``."""
    assert hasattr(wrappers, "_in_fabric_backward")  # Lightning's own, and private
    wrappers._in_fabric_backward = True
    try:
        backward(loss)
    finally:
        wrappers._in_fabric_backward = False
