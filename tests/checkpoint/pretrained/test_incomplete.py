"""A model whose loading began and did not end is not saved, neither by Fabric nor as a run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import OnExceptionCheckpoint

import lightning_cp
from lightning_cp.checkpoint.pretrained import load as load_module
from lightning_cp.errors import CheckpointError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.checkpoint.pretrained.models import make, save
from tests.checkpoint.pretrained.test_strategies import Module, batches


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of which only the first tensors can be read."""
    save(tmp_path / "weights")
    read: list[Any] = []

    class Breaks(load_module.SliceReader):
        def read(self, entry: Any, offsets: Any, into: Any) -> None:
            read.append(entry)
            if len(read) == 3:
                raise OSError(5, "Input/output error")
            super().read(entry, offsets, into)

    monkeypatch.setattr(load_module, "SliceReader", Breaks)
    return tmp_path / "weights"


def test_fabric_saves_no_incomplete_model(broken: Path, tmp_path: Path) -> None:
    fabric = Fabric(
        accelerator="cpu", devices=1, strategy=UlyssesRingStrategy(pretrained=str(broken))
    )
    fabric.launch()
    model = make(device="meta")
    with pytest.raises((CheckpointError, OSError), match="Input/output error"):
        fabric.setup(model)
    with pytest.raises(CheckpointError, match="this model is incomplete"):
        fabric.save(tmp_path / "saved", {"model": model})
    assert [x.name for x in tmp_path.iterdir()] == ["weights"]


@pytest.mark.filterwarnings("ignore:.*ckpt_path=")  # Lightning's, of the callback
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_nor_does_a_trainer_that_ends_with_the_error(
    engine: str, broken: Path, tmp_path: Path
) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=lightning_cp.UlyssesRingStrategy(pretrained=str(broken), data_parallel=engine),
        callbacks=[OnExceptionCheckpoint(tmp_path)],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(CheckpointError, match="this model is incomplete") as raised:
        trainer.fit(Module(), batches())
    assert "Input/output error" in str(raised.value.__context__)
    assert [x.name for x in tmp_path.iterdir()] == ["weights"]
