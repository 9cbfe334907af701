"""A user's script whose Trainer starts workers: ``workers.py OUT HOW [predict]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.helpers.launch.scripts.model import QUIET, Tiny, text, weights

if __name__ == "__main__":  # spawned workers import this file
    out, how, *then = sys.argv[1:]
    module = Tiny()
    trainer = pl.Trainer(strategy=f"ulysses_ring_{how}", devices=2, **QUIET)
    trainer.fit(module, text())
    result: dict[str, Any] = {"weights": weights(module)}
    result["loss"] = float(trainer.callback_metrics["loss"])
    trainer.save_checkpoint(Path(out) / "saved.ckpt")
    result["saved"] = weights(Tiny.load_from_checkpoint(Path(out) / "saved.ckpt"))
    if then == ["predict"]:
        result["predictions"] = trainer.predict(module, text())
    torch.save(result, Path(out) / "0.pt")
