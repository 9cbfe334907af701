"""A project that only changes its strategy's name: what it finds on the disk is what DDP leaves."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_cp import UlyssesRingStrategy
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.states import same
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import trainer_of
from tests.ranks.checkpoint.test_objects import Conf

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


BOTH = ("ddp", "ours")


def boring_trainer(world_size: int, name: str, io: Any = None, **options: Any) -> pl.Trainer:
    """Two batches an epoch, with DDP, or with ours where no sequence is shared; ``io``: a plugin."""
    sizes: dict[str, Any] = {"context_parallel_size": 1, "data_parallel_size": world_size}
    strategy: Any = "ddp" if name == "ddp" else UlyssesRingStrategy(**sizes)
    plugins = [PoolEnvironment(), *([] if io is None else [io])]
    quiet = {"limit_train_batches": 2, "limit_val_batches": 0, "plugins": plugins, **options}
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


def saves_before_a_run(rank: int, world_size: int) -> None:
    found: list[Any] = []
    for name in BOTH:
        trainer = boring_trainer(world_size, name, max_epochs=1)
        torch.manual_seed(0)
        trainer.strategy.connect(BoringModel())
        trainer.save_checkpoint(f"{name}.ckpt")
        dist.barrier()
        saved: Any = torch.load(f"{name}.ckpt")
        saved.pop("lightning_cp", None)
        found.append(saved)
    assert same(found[1], found[0])
    again = boring_trainer(world_size, "ours", max_epochs=1)
    with pytest.warns(UserWarning, match="no state of optimizers") if rank == 0 else nullcontext():
        again.fit(BoringModel(), ckpt_path="ours.ckpt")
    assert again.global_step == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_saves_before_any_run(world_size: int) -> None:
    run_ranks(world_size, saves_before_a_run)


class Saves(pl.Callback):
    """As soon as it can; and is asked for a state."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.save_checkpoint(f"{self.name}.ckpt")

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"a": 1}


def saves_in_setup(rank: int, world_size: int) -> None:
    for name in BOTH:
        saves = Saves(name)
        boring_trainer(world_size, name, max_epochs=1, callbacks=[saves]).fit(BoringModel())
        assert Path(f"{name}.ckpt").is_file()
        assert saves.asked == 1  # at saves only, not in each step


def test_a_callback_saves_in_setup() -> None:
    run_ranks(2, saves_in_setup)


def finds_nothing(rank: int, world_size: int) -> None:
    for name in BOTH:
        with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
            goes_on(world_size, name, "missing.ckpt")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_missing_checkpoint_is_a_file_that_is_not_found(world_size: int) -> None:
    run_ranks(world_size, finds_nothing)
