"""Prints the rows of each batch of a shuffled loader: ``shuffled.py STRATEGY DEVICES``."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.helpers.launch.scripts.model import QUIET, Tiny, text


class Numbered(Tiny):
    """Prints the numbers of the rows."""

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        line = f"rank {self.global_rank} batch {batch_idx} rows {batch['row'].tolist()}\n"
        sys.stdout.write(line)
        sys.stdout.flush()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        inputs = {name: x for name, x in batch.items() if name != "row"}
        return super().training_step(inputs, batch_idx)


if __name__ == "__main__":  # spawned workers import this file
    strategy, devices = sys.argv[1:]
    module = Numbered()
    rows: Any = [{**row, "row": at} for at, row in enumerate(text().dataset)]  # type: ignore[arg-type]
    torch.manual_seed(7)
    loader: Any = DataLoader(rows, batch_size=2, shuffle=True)
    pl.Trainer(strategy=strategy, devices=int(devices), **QUIET).fit(module, loader)
