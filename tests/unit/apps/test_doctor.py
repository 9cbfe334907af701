"""The doctor ends before the first step: nothing is trained."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_cp.apps.doctor.examine import StopBeforeTraining


class Untrained(BoringModel):
    def training_step(self, batch: object, batch_idx: int) -> None:
        pytest.fail("a step ran")


def test_nothing_is_trained() -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[StopBeforeTraining()],
    )
    trainer.fit(Untrained())
    assert trainer.global_step == 0
