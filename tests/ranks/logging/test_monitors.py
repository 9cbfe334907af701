"""What watches a value acts as in one process: early stopping, checkpoints, plateau schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.logs import Logs
from tests.helpers.strategies.small import HYBRID, RING, Batch, Settings, loader, trainer_of

EPOCHS = 8


class Monitored(Logs):
    """Its loss falls, then rises, as the learning rate is too high; all kinds of values tell so."""

    def __init__(self, monitor: str) -> None:
        super().__init__()
        self.monitor = monitor
        self.rates: list[float] = []

    def measure(self, stage: str, batch: Batch) -> torch.Tensor:
        logits = self.logits(batch).flatten(0, 1)
        targets = batch["labels"].flatten()
        total = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        count = (targets != -100).sum()
        loss = total / count.clamp(min=1)
        self.log(f"{stage}_loss", loss, on_step=stage == "train", on_epoch=True, batch_size=2)
        self.cp_log(f"{stage}_mean", total, count, on_epoch=True)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.measure("train", batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.measure("val", batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=3.0, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor, "interval": "epoch"},
        }


def watch(rank: int, world_size: int, settings: Settings | None, monitor: str) -> dict[str, Any]:
    module = Monitored(monitor)
    stopping = EarlyStopping(monitor, patience=2, min_delta=1e-3)
    checkpoint = ModelCheckpoint(
        "kept", monitor=monitor, filename="{epoch}-{" + monitor + ":.6f}", save_top_k=2
    )
    trainer = trainer_of(
        world_size,
        settings,
        max_epochs=EPOCHS,
        callbacks=[stopping, checkpoint],
        enable_checkpointing=True,
    )
    trainer.fit(module, loader(6), loader(6))
    return {
        "stopped": (stopping.stopped_epoch, trainer.current_epoch, trainer.global_step),
        "waited": stopping.wait_count,
        "best": float(checkpoint.best_model_score),  # type: ignore[arg-type]
        "path": Path(checkpoint.best_model_path).name,
        "kept": sorted(Path(path).name for path in checkpoint.best_k_models),
        "rates": module.rates,
    }


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True:UserWarning")
@pytest.mark.parametrize("monitor", ["train_loss", "train_mean", "val_loss", "val_mean"])
def test_monitors_act_as_in_one_process(monitor: str) -> None:
    (want,) = run_ranks(1, watch, None, monitor)
    assert 0 < want["stopped"][0] < EPOCHS - 1, "it stopped early"
    assert len(set(want["rates"])) > 1, "the learning rate was lowered"
    assert not want["path"].startswith(f"epoch={want['stopped'][0]}")
    for settings, ranks in ((RING, 2), (HYBRID, 4)):
        for got in run_ranks(ranks, watch, settings, monitor):
            assert got.pop("best") == pytest.approx(want["best"], rel=1e-8)
            assert got == {name: value for name, value in want.items() if name != "best"}
