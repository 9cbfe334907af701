"""Saved inside an accumulation window, the Trainer's or a user's own: it is replayed from its beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.pool import run_ranks
from tests.helpers.resume.runs import Batch, Dropping, SaveAt, run
from tests.helpers.strategies.small import RING
from tests.ranks.resume.test_trainer import BATCH, EPOCH, Cell, compare

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]

WINDOW = 3


class Noisy(Dropping):
    """Every hook that comes before a batch's step draws, and changes what is trained on or counted."""

    noise = 0.0

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return self.masked(batch)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return self.masked(batch)

    def masked(self, batch: Batch) -> Batch:
        ids = batch["input_ids"].clone()
        ids[torch.rand(ids.shape) < 0.2] = 0
        return {**batch, "input_ids": ids}

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.get_buffer("count").add_(1)
        self.noise = float(torch.rand(()))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.noise)


class Early(Noisy):
    """Has a hook that comes before Lightning counts the batch; the Trainer's callbacks have none."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        batch = super().on_before_batch_transfer(batch, dataloader_idx)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if self.trainer.training and isinstance(callback, SaveAt):
                callback.act(self.trainer)
        return batch


class Manual(Dropping):
    """Accumulates and steps by itself."""

    def __init__(self, train: str) -> None:
        super().__init__(train)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / WINDOW)
        if self.is_full(batch_idx + 1):
            self.step()
        return {"loss": loss.detach()}

    def is_full(self, batches: int) -> bool:
        return batches % WINDOW == 0 or self.trainer.is_last_batch

    def step(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Raw(Manual):
    """Steps the optimizer itself, past Lightning's wrapper of it; gradients are zeroed when the next come."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx % WINDOW == 0:
            self.trainer.optimizers[0].zero_grad()
        return super().training_step(batch, batch_idx)

    def step(self) -> None:
        self.trainer.optimizers[0].step()


class Across(Manual):
    """Has windows that begin in one epoch and end in the next."""

    def is_full(self, batches: int) -> bool:
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.ready % 4 == 0


THREE: dict[str, Any] = {"accumulate_grad_batches": WINDOW}
NOISY, MANUAL, RAW = {"kind": Noisy, **THREE}, {"kind": Manual}, {"kind": Raw}
ACROSS = {"kind": Across}
CELLS: dict[str, Cell] = {
    "hooks that draw": (BATCH, 5, 3, NOISY),
    "hooks that draw, between windows": (BATCH, 6, 6, NOISY),
    "hooks that draw, first batch of a window": ("on_train_batch_start", 4, 3, NOISY),
    "hooks that draw, in a step": ("on_before_optimizer_step", 6, 3, NOISY),
    "hooks that draw, stream": (BATCH, 5, 3, {**NOISY, "train": "stream"}),
    "before the transfer": ("on_fit_end", 6, 6, {"kind": Early}),
    "before the transfer, next epoch": ("on_fit_end", 10, 10, {"kind": Early}),
    "before the transfer, window": ("on_fit_end", 6, 6, {"kind": Early, **THREE}),
    "before the transfer, in a window": ("on_fit_end", 5, 3, {"kind": Early, **THREE}),
    "manual, first window": (BATCH, 2, 0, MANUAL),
    "manual, later window": (BATCH, 5, 3, MANUAL),
    "manual, in a step": ("on_before_optimizer_step", 6, 3, MANUAL),
    "manual, between windows": (BATCH, 6, 6, MANUAL),
    "manual, next epoch": (BATCH, 12, 10, MANUAL),
    "manual, last batch": (BATCH, 10, 10, MANUAL),
    "across epochs, before": (BATCH, 10, 8, ACROSS),
    "across epochs, epoch end": (EPOCH, 10, 8, ACROSS),
    "across epochs, after": (BATCH, 11, 8, ACROSS),
    "raw, first window": (BATCH, 2, 0, RAW),
    "raw, later window": (BATCH, 5, 3, RAW),
    "raw, between windows": (BATCH, 6, 6, RAW),
}


@pytest.mark.quick("hooks that draw", "manual, first window", "across epochs, after")
@pytest.mark.parametrize("name", CELLS)
def test_is_replayed_from_its_beginning(name: str, tmp_path: Path) -> None:
    compare(CELLS[name], 2, RING, tmp_path / "saved.ckpt")


@pytest.mark.quick("hooks that draw")
@pytest.mark.parametrize("options", [MANUAL, NOISY], ids=["manual", "hooks that draw"])
def test_in_the_first_window_of_a_run_that_went_on(options: dict[str, Any], tmp_path: Path) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    run_ranks(2, run, RING, (BATCH, 5, first), **options)
    whole = run_ranks(2, run, RING, (BATCH, 4, second), first, 77, **options)
    rest = run_ranks(2, run, RING, None, second, 78, **options)
    assert rest == whole
