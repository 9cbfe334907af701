"""A user's LightningCLI; it does not import lightning_cp. Results go to where $OUT says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI

from tests.helpers.launch.scripts.model import QUIET, Tiny, text, weights


class Text(pl.LightningDataModule):
    """The text of all tests here."""

    def train_dataloader(self) -> Any:
        return text()


if __name__ == "__main__":
    cli = LightningCLI(Tiny, Text, trainer_defaults=QUIET, seed_everything_default=1)
    module: Any = cli.model
    result = {"weights": weights(module), "losses": module.losses}
    torch.save(result, Path(os.environ["OUT"]) / f"rank{cli.trainer.global_rank}.pt")
