"""Where a rank is, noted as Lightning calls the strategy: in front of its own strategies' methods."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightning_cp.consistency.finite import FiniteGuard
from lightning_cp.launch.preemption import noting_sigterm
from lightning_cp.utils.patching import PatchSet
from lightning_cp.watchdog.phase import Phase, Position
from lightning_cp.watchdog.watch import RunWatch

_log = logging.getLogger("lightning_cp")


class WatchedSteps:
    """The part that the Trainer's strategy and Fabric's have in common."""

    _core: Any  # a ContextParallelCore

    @property
    def _watch(self) -> RunWatch:
        return self._core.watch

    @property
    def _position(self) -> Position:
        return self._core.watch.position

    def progress(self) -> None:
        """Say that this rank goes on, from any thread, however often: for long work of your own.

        The watch ends a run in which no rank does anything that it knows of for ``first_step_timeout``
        outside of steps, or ``step_timeout`` within one. Work that is not the strategy's (data that is
        prepared, an evaluation, a file that is sent somewhere) is unknown to it.
        """
        self._position.progress()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's, noted as a save; what was under way goes on afterwards."""
        parent: Any = super()
        with self._position.during(Phase.SAVE):
            return parent.save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's, noted as a load; what was under way goes on afterwards."""
        parent: Any = super()
        with self._position.during(Phase.LOAD):
            return parent.load_checkpoint(*args, **kwargs)


class WatchedTrainerSteps(WatchedSteps):
    """The Trainer's."""

    _replaced: PatchSet

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's; a micro-batch begins, of the step that the Trainer counts if it does."""
        parent: Any = super()
        module = parent.lightning_module
        counted = module.trainer.global_step if module.automatic_optimization else None
        self._position.begin_micro_batch(counted)
        return parent.training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Any) -> None:
        """As the strategy's; the backward of a step begins."""
        self._position.enter(Phase.BACKWARD)
        parent: Any = super()
        parent.pre_backward(closure_loss)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """As the strategy's; the optimizer's phase begins after its closure, which has the backward."""

        def to_the_end() -> Any:
            result = closure()
            self._position.enter(Phase.OPTIMIZER)
            return result

        parent: Any = super()
        stepped = parent.optimizer_step(optimizer, to_the_end, *args, **kwargs)
        self._position.end_step()
        return stepped

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's, noted as validation."""
        self._position.enter(Phase.VALIDATION)
        parent: Any = super()
        return parent.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's, noted as a test."""
        self._position.enter(Phase.TEST)
        parent: Any = super()
        return parent.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's, noted as a prediction."""
        self._position.enter(Phase.PREDICTION)
        parent: Any = super()
        return parent.predict_step(*args, **kwargs)

    def keep_from_saving(self, trainer: Trainer) -> None:
        """After an error of some rank: nobody saves, as the other ranks would have to take part."""
        if self._watch.failed:
            self.save_no_more(trainer)

    def save_no_more(self, trainer: Trainer) -> None:
        """Until the Trainer's teardown, neither callbacks nor anybody else saves."""
        self._replaced.replace(trainer, "save_checkpoint", lambda _: _not_saved)
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Checkpoint):  # it would give up an older one for the new one
                self._replaced.replace(callback, "on_exception", lambda _: _ignored)

    def teardown(self) -> None:
        """As the strategy's; ranks no longer watch each other."""
        self._core.end_watch()
        parent: Any = super()
        parent.teardown()


def _ignored(*_: Any, **__: Any) -> None:
    pass


def _not_saved(filepath: Any, *_: Any, **__: Any) -> None:
    _log.warning("after an error no checkpoint is saved: other ranks would have to take part.")


class WatchedFabricSteps(WatchedSteps):
    """Fabric's."""

    _guard: FiniteGuard

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's, noted as the backward of a step."""
        self._position.enter(Phase.BACKWARD)
        parent: Any = super()
        return parent.backward(*args, **kwargs)

    @property
    def should_stop(self) -> bool:
        """True if some rank was sent SIGTERM: the same on all ranks, as they tell each other at every step.

        To be looked at by every rank, after each step. From the first look on SIGTERM ends no process any
        more, as long as this strategy is there; before it, as ever. Once true, it remains so.
        """
        if self._guard.wish is None:
            self._guard.wish = noting_sigterm(self).wish
        return self._guard.wishes > 0

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's; a step ends with it."""
        self._position.enter(Phase.OPTIMIZER)
        parent: Any = super()
        stepped = parent.optimizer_step(*args, **kwargs)
        self._position.end_step()
        return stepped
