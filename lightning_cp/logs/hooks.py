"""Functions put in front of a module's own methods, and the hooks in which something may be logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_cp.module_hooks import replace_method

BATCH_ENDS = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end")
EPOCH_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")
_BETWEEN = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "backward",
)
"""Hooks of a training batch after its step."""


class Patches:
    """Attributes of instances that are put back by ``undo``."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: object, name: str, value: Callable[..., Any]) -> None:
        """Have ``owner.name`` be ``value``, for this one instance: a copy of it has its own again."""
        self._undo.append(replace_method(owner, name, value))

    def undo(self) -> None:
        """Leave everything as it was."""
        while self._undo:
            self._undo.pop()()


def hooks_may_log(trainer: Trainer, module: LightningModule) -> bool:
    """True if somebody has hooks after the step of a batch; Lightning's own callbacks do not log there."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    own = ("lightning.", "lightning_cp.callback", "lightning_cp.strategies.")
    theirs = [x for x in callbacks if not type(x).__module__.startswith(own)]
    owners = [(module, LightningModule), *((callback, Callback) for callback in theirs)]
    return any(
        hasattr(parent, hook) and is_overridden(hook, owner, parent)
        for owner, parent in owners
        for hook in (*_BETWEEN, *BATCH_ENDS)
    )
