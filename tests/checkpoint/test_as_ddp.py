"""A project that only changes its strategy's name: what it finds on the disk is what DDP leaves."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_cp import UlyssesRingStrategy
from lightning_cp.errors import CheckpointError
from tests.checkpoint.test_objects import Conf
from tests.pool import run_ranks
from tests.strategies.small import trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


BOTH = ("ddp", "ours")


def boring_trainer(world_size: int, name: str, **options: Any) -> pl.Trainer:
    """Two batches an epoch, with DDP, or with ours where no sequence is shared."""
    sizes: dict[str, Any] = {"context_parallel_size": 1, "data_parallel_size": world_size}
    strategy: Any = "ddp" if name == "ddp" else UlyssesRingStrategy(**sizes)
    quiet = {"limit_train_batches": 2, "limit_val_batches": 0, **options}
    return trainer_of(world_size, {}, strategy=strategy, **quiet)


class Numbered(ModelCheckpoint):
    """Whose last one has another name each time."""

    CHECKPOINT_NAME_LAST = "last-{epoch}"


KEPT: list[Callable[[str], ModelCheckpoint]] = [
    partial(ModelCheckpoint, save_top_k=-1),
    partial(ModelCheckpoint, save_top_k=1, save_last=True),
    partial(Numbered, save_top_k=-1, save_last="link"),
    partial(Numbered, save_top_k=1, save_last="link"),
]


def left_by(world_size: int, name: str, keep: ModelCheckpoint) -> Any:
    """Names in the folder, and of links those to which they lead."""
    options: Any = {"max_epochs": 2, "enable_checkpointing": True, "callbacks": [keep]}
    boring_trainer(world_size, name, **options).fit(BoringModel())
    dist.barrier()
    folder = Path(str(keep.dirpath))
    return {x.name: x.is_symlink() and x.resolve().name for x in folder.iterdir()}


def lists_folders(rank: int, world_size: int) -> None:
    for at, kept in enumerate(KEPT):
        ddp, ours = (left_by(world_size, name, kept(f"{name}-{at}")) for name in BOTH)
        # Of links whose checkpoint is gone DDP leaves some.
        assert ours == {name: to for name, to in ddp.items() if not to or to in ddp}, kept


@pytest.mark.parametrize("world_size", [1, 2])
def test_folders_have_what_ddp_leaves(world_size: int) -> None:
    run_ranks(world_size, lists_folders)


class Configured(BoringModel):
    """As of a project that keeps its arguments in a Namespace."""

    def __init__(self, args: argparse.Namespace, conf: Conf, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


def configured() -> Configured:
    return Configured(argparse.Namespace(lr=0.1), Conf(0.2))


def goes_on(world_size: int, name: str, path: str, **options: Any) -> int:
    trainer = boring_trainer(world_size, name, max_epochs=2)
    trainer.fit(configured(), ckpt_path=path, **options)
    return trainer.global_step


def keeps_hyperparameters(rank: int, world_size: int) -> None:
    for name in BOTH:
        trainer = boring_trainer(world_size, name, max_epochs=1)
        trainer.fit(configured())
        trainer.save_checkpoint(f"{name}.ckpt")
    ddp, ours = (
        Configured.load_from_checkpoint(f"{name}.ckpt", weights_only=False).hparams for name in BOTH
    )
    assert ours == ddp == {"args": argparse.Namespace(lr=0.1), "conf": Conf(0.2), "size": 3}
    assert goes_on(world_size, "ours", "ddp.ckpt", weights_only=False) == 4
    assert goes_on(world_size, "ours", "ours.ckpt", weights_only=False) == 4
    assert goes_on(world_size, "ours", "ours.ckpt") == 4
    with pytest.raises(CheckpointError, match=r"\((argparse|.*Conf).* say weights_only=False"):
        goes_on(world_size, "ours", "ddp.ckpt")


@pytest.mark.parametrize("world_size", [1, 2])
def test_hyperparameters_are_those_of_ddp(world_size: int) -> None:
    run_ranks(world_size, keeps_hyperparameters)
