"""Every level, every ``sync_dist``, every stage: bar, file and metrics are those of one process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.logs import DDP, RING_TWICE, Logs, Report, same_reports, watched
from tests.helpers.strategies.small import HYBRID, RING, ULYSSES, Batch, Settings

LEVELS: dict[str, Any] = {
    "step": {"on_step": True, "on_epoch": False},
    "epoch": {"on_step": False, "on_epoch": True},
    "both": {"on_step": True, "on_epoch": True},
    "default": {},
}
SYNC: dict[str, Any] = {
    "unset": {},
    "sync": {"sync_dist": True},
    "off": {"sync_dist": False},
}


class Combined(Logs):
    """Logs its loss in every combination, and from a callback's place as well."""

    def everything(self, stage: str, value: torch.Tensor) -> None:
        for level, levels in LEVELS.items():
            for sync, dist in SYNC.items():
                name = f"{stage}/{level}/{sync}"
                self.log(name, value, prog_bar=True, batch_size=2, **levels, **dist)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.everything("train", loss)
        self.kept = loss.detach()  # a rank's own
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.everything("val", loss)
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.everything("test", self.loss(batch))

    def on_after_backward(self) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.everything("after_backward", torch.stack(norms).norm())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("twice", 2.0, on_step=False, on_epoch=True)  # Lightning keeps names by hook
        self.everything("zero_grad", torch.tensor(self.trainer.global_step + 0.25))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("twice", 1.0, on_step=True, on_epoch=False)
        self.everything("optimizer", self.kept)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.everything("backward", self.kept)  # the argument is weighted already

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.everything("batch_end", outputs["loss"])

    def on_validation_batch_end(self, outputs: Any, *args: Any, **kwargs: Any) -> None:
        self.everything("val_batch_end", outputs)


@lru_cache(maxsize=1)
def plain() -> Report:
    (want,) = run_ranks(1, watched, None, Combined)
    assert max(map(len, want["seen"])) > 200
    values = {row["train/step/unset"] for row in want["csv"] if "train/step/unset" in row}
    assert len(values) == 5, "steps can be told apart"
    return want


@pytest.mark.nightly
@pytest.mark.parametrize(("settings", "ranks"), [(RING, 2), (ULYSSES, 2), (HYBRID, 4)])
def test_every_combination_shows_what_one_process_shows(settings: Settings, ranks: int) -> None:
    for report in run_ranks(ranks, watched, settings, Combined):
        same_reports(report, plain())
        assert not report["told"]


@pytest.mark.nightly
def test_with_data_parallelism_every_combination_shows_what_plain_ddp_shows() -> None:
    """``sync_dist`` is over ranks with other samples only."""
    want = run_ranks(2, watched, DDP, Combined)
    got = run_ranks(4, watched, RING_TWICE, Combined)
    assert got[0]["csv"]
    for rank, report in enumerate(got):
        same_reports(report, want[rank // 2])
        assert not report["told"]
    last = [report["seen"][-1] for report in got]
    own, synced = "callback_metrics: test/epoch/off", "callback_metrics: test/epoch/sync"
    assert last[0][own] != pytest.approx(last[2][own])
    assert last[0][synced] == pytest.approx(last[2][synced])
