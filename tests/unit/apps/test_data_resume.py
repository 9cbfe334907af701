"""A resumed run trains on the sequences that an uninterrupted one would have trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cp.apps.data import ByteDataModule, text_files

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*"),
    pytest.mark.filterwarnings("ignore:.*checkpoint that ended before the epoch ended.*"),
]


class Reader(L.LightningModule):
    """Remembers what it was given; asks for the number of steps early, as schedules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, ...]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += [tuple(row.tolist()) for row in batch["input_ids"]]
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(8):
        bytes_ = torch.randint(32, 127, (100,), generator=generator).to(torch.uint8)
        (folder / f"{index}.txt").write_bytes(bytes(bytes_.tolist()))
    return folder


def run(folder: Path, steps: int, resume: Path | None = None, **options: Any) -> Reader:
    data = ByteDataModule(text_files([folder]), seq_len=32, batch_size=2, validation_fraction=0.2)
    assert len(data.training) // 2 == 9  # batches of an epoch; one sequence is left over
    module = Reader()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"val_check_interval": 100, "enable_checkpointing": False, **options},
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    if not options:
        trainer.save_checkpoint(folder.parent / "end.ckpt")
    return module


@pytest.mark.quick("9", "10")
@pytest.mark.parametrize("steps", [1, 5, 9, 10, 14, 18])
def test_after_any_number_of_steps(data_folder: Path, steps: int) -> None:
    whole = run(data_folder, 24).seen
    first = run(data_folder, steps).seen
    rest = run(data_folder, 24, data_folder.parent / "end.ckpt").seen
    assert len(set(whole[:18])) == 18
    assert whole[:18] != whole[18:36]  # a new order every epoch
    assert first + rest == whole


@pytest.mark.parametrize("steps", [3, 9, 12])
def test_from_a_checkpoint_that_a_validation_wrote(data_folder: Path, steps: int) -> None:
    whole = run(data_folder, 24).seen
    saved = data_folder.parent / "saved"
    callback = ModelCheckpoint(saved, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [callback]}
    run(data_folder, 24, val_check_interval=3, **options)
    rest = run(data_folder, 24, saved / f"step={steps}.ckpt").seen
    assert rest == whole[2 * steps :]
