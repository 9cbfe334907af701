"""A model whose loading began and did not end is not saved, neither by Fabric nor as a run ends."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_cp.checkpoint.pretrained import load as load_module
from lightning_cp.errors import CheckpointError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.checkpoint.pretrained.models import make, save
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import trainer_of
from tests.ranks.checkpoint.pretrained.test_strategies import Module, batches


class Breaks(load_module.SliceReader):
    """Of a checkpoint only the first tensors can be read."""

    count = 0

    def read(self, entry: Any, offsets: Any, into: Any) -> None:
        self.count += 1
        if self.count == 3:
            raise OSError(5, "Input/output error")
        super().read(entry, offsets, into)


def by_fabric(rank: int, world_size: int, folder: Path) -> None:
    strategy = UlyssesRingStrategy(pretrained=str(folder / "weights"))
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    model = make(device="meta")
    with (
        mock.patch.object(load_module, "SliceReader", Breaks),
        pytest.raises((CheckpointError, OSError), match="Input/output error"),
    ):
        fabric.setup(model)
    with pytest.raises(CheckpointError, match="this model is incomplete"):
        fabric.save(folder / "saved", {"model": model})


def test_fabric_saves_no_incomplete_model(tmp_path: Path) -> None:
    save(tmp_path / "weights")
    run_ranks(1, by_fabric, tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["weights"]


def by_trainer(rank: int, world_size: int, folder: Path, engine: str) -> str:
    settings = {"pretrained": str(folder / "weights"), "data_parallel": engine}
    trainer = trainer_of(
        world_size,
        settings,
        callbacks=[OnExceptionCheckpoint(folder)],
        enable_checkpointing=True,
    )
    warnings.filterwarnings(
        "ignore", ".*ckpt_path="
    )  # Lightning's, of the callback; until the next test
    with (
        mock.patch.object(load_module, "SliceReader", Breaks),
        pytest.raises(CheckpointError, match="this model is incomplete") as raised,
    ):
        trainer.fit(Module(), batches())
    return str(raised.value.__context__)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_nor_does_a_trainer_that_ends_with_the_error(engine: str, tmp_path: Path) -> None:
    save(tmp_path / "weights")
    (said,) = run_ranks(1, by_trainer, tmp_path, engine)
    assert "Input/output error" in said
    assert [x.name for x in tmp_path.iterdir()] == ["weights"]
