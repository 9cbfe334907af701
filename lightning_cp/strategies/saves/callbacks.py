"""What callbacks that save do otherwise where several ranks do: links, and saves by a rank that leaves."""

from __future__ import annotations

from typing import Any

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
    """Have links made once they have something to point to, and nobody save alone when a rank fails."""
    replaced.undo()
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and hasattr(callback, "_link_checkpoint"):
            replaced.replace(callback, "_link_checkpoint", lambda own: _linking(saver))
        saves = isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint))
        if saves and World().size > 1 and getattr(callback, "save_on_exception", True):
            replaced.replace(callback, "on_exception", lambda own: _not_alone)


def _linking(saver: Any) -> Any:
    def link(trainer: Trainer, filepath: str, linkpath: str) -> None:
        saver.link(filepath, linkpath)

    return link


def _not_alone(trainer: Trainer, module: LightningModule, error: BaseException) -> None:
    rank_zero_info(f"no checkpoint is saved on {type(error).__name__}: {ALONE}")
