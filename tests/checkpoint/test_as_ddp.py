"""A project that only changes its strategy's name: what it finds on the disk is what DDP leaves."""

from __future__ import annotations

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
from tests.pool import run_ranks
from tests.strategies.small import trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def strategies(world_size: int, **options: Any) -> dict[str, Any]:
    """DDP, and ours where no sequence is shared."""
    sizes = {"context_parallel_size": 1, "data_parallel_size": world_size}
    return {"ddp": "ddp", "ours": UlyssesRingStrategy(**sizes, **options)}


def boring_trainer(world_size: int, strategy: Any, **options: Any) -> pl.Trainer:
    """Two batches an epoch."""
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


def left_by(world_size: int, strategy: Any, keep: ModelCheckpoint) -> Any:
    """Names in the folder, and of links those to which they lead."""
    options: Any = {"max_epochs": 2, "enable_checkpointing": True, "callbacks": [keep]}
    boring_trainer(world_size, strategy, **options).fit(BoringModel())
    dist.barrier()
    folder = Path(str(keep.dirpath))
    return {x.name: x.is_symlink() and x.resolve().name for x in folder.iterdir()}


def lists_folders(rank: int, world_size: int) -> None:
    for at, kept in enumerate(KEPT):
        ddp, ours = (
            left_by(world_size, strategy, kept(f"{name}-{at}"))
            for name, strategy in strategies(world_size).items()
        )
        # Of links whose checkpoint is gone DDP leaves some.
        assert ours == {name: to for name, to in ddp.items() if not to or to in ddp}, kept


@pytest.mark.parametrize("world_size", [1, 2])
def test_folders_have_what_ddp_leaves(world_size: int) -> None:
    run_ranks(world_size, lists_folders)
