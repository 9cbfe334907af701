"""Decisions of Lightning by a value, and saves of callbacks, where several ranks do them together.

A value that is logged without ``sync_dist`` is another one on each data rank. What it decides (which
checkpoint is the best, its name, a learning rate) has to be the same on all of them: ranks that name other
files wait for each other, and those with other learning rates train parts of what is no model. So the first
rank's decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_cp.comm.objects import World
from lightning_cp.strategies.replaced import Replaced

ALONE = (
    "a rank that leaves with an error cannot save for all, because the others are not going to take part. "
    "The last complete checkpoint is the one to resume from."
)


def adopt_callbacks(replaced: Replaced, trainer: Trainer, saver: Any) -> None:
    """Have ranks decide by the same values, links made once they point to something, and nobody save alone.

    Args:
        replaced: gives back what is replaced.
        trainer: whose callbacks and loops decide.
        saver: makes the links, and warns.
    """
    replaced.undo()
    loop: Any = trainer.fit_loop.epoch_loop
    if World().size > 1:
        replaced.replace(loop, "_get_monitor_value", lambda own: _value_of_first(own, saver))
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and hasattr(callback, "_link_checkpoint"):
            replaced.replace(callback, "_link_checkpoint", lambda own: _linking(saver))
        if World().size > 1 and isinstance(callback, ModelCheckpoint):
            _decide_by_first(replaced, callback, saver)
        saves = isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint))
        if saves and World().size > 1 and getattr(callback, "save_on_exception", True):
            replaced.replace(callback, "on_exception", lambda own: _not_alone)


def _decide_by_first(replaced: Replaced, callback: Any, saver: Any) -> None:
    def replacement(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda trainer: _of_first(own(trainer), callback.monitor, saver)

    replaced.replace(callback, "_monitor_candidates", replacement)


def _value_of_first(own: Callable[[str], Any], saver: Any) -> Callable[[str], Any]:
    def value(key: str) -> Any:
        found = own(key)
        return _of_first({} if found is None else {key: found}, key, saver).get(key)

    return value


def _of_first(values: dict[str, Any], decides: str | None, saver: Any) -> dict[str, Any]:
    """The first rank's logged values, on this rank's devices. Collective.

    Args:
        values: this rank's.
        decides: the name of the one that is monitored; where ranks differ in it that is said once.
        saver: warns.
    """
    every = World().gather({k: x.cpu() if _is(x) else x for k, x in values.items()})
    first = every[0]
    for rank, other in enumerate(every):
        said = [_shown(found.get(decides)) for found in (first, other)] if decides else []
        if len(set(said)) > 1:
            saver.say_once(
                f"ranks have other values of {decides!r}, which is monitored: {said[0]} on rank 0, {said[1]} "
                f"on rank {rank}. That of rank 0 decides on all of them. "
                + (_LACKS if "none" in said else _MEAN),
                about=f"monitored {decides}",
            )
            break
    devices = {name: x.device for name, x in values.items() if _is(x)}
    return {
        name: x.to(devices[name]) if _is(x) and name in devices else x for name, x in first.items()
    }


_MEAN = "Log it with sync_dist=True to have the mean of all decide."
_LACKS = "To have the mean of all decide, log it on all of them, with sync_dist=True."


def _is(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, torch.Tensor)


def _shown(x: object) -> str:
    return "none" if x is None else f"{float(x):g}" if _is(x) and x.numel() == 1 else repr(x)


def _linking(saver: Any) -> Any:
    def link(trainer: Trainer, filepath: str, linkpath: str) -> None:
        saver.link(filepath, linkpath)

    return link


def _not_alone(trainer: Trainer, module: LightningModule, error: BaseException) -> None:
    rank_zero_info(f"no checkpoint is saved on {type(error).__name__}: {ALONE}")
