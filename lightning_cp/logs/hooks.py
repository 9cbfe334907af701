"""Functions put in front of a module's own methods, and the hooks in which something may be logged."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

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
        self._before: list[tuple[object, str, Any]] = []

    def put(self, owner: object, name: str, value: Callable[..., Any]) -> None:
        """Have ``owner.name`` be ``value``, for this one instance: a copy of it has its own again."""
        self._before.append((owner, name, vars(owner).get(name)))
        object.__setattr__(owner, name, _InFront(owner, name, value))

    def undo(self) -> None:
        """Leave everything as it was."""
        while self._before:
            owner, name, before = self._before.pop()
            vars(owner).pop(name, None)
            if before is not None:
                object.__setattr__(owner, name, before)


class _InFront:
    """Called in place of a method of one instance."""

    def __init__(self, owner: object, name: str, value: Callable[..., Any]) -> None:
        self._owner, self._name, self._value = owner, name, value
        self.__wrapped__ = getattr(value, "__wrapped__", value)  # Lightning asks what is overridden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._value(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_method(memo[id(self._owner)], self._name)

    def __reduce__(self) -> Any:
        return _own_method, (self._owner, self._name)


def _own_method(owner: object, name: str) -> MethodType | None:
    method = getattr(type(owner), name, None)
    return None if method is None else MethodType(method, owner)


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
