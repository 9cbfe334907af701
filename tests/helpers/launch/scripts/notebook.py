"""The cells of a notebook: no main guard, a class that no worker could import. Not a script of its own."""

from __future__ import annotations

CELLS = """
import lightning.pytorch as pl
import torch
from tests.helpers.launch.scripts.model import QUIET, Tiny, text, weights

class Mine(Tiny):
    "Defined in a cell."

module = Mine()
trainer = pl.Trainer(strategy="ulysses_ring_fork", devices=2, **QUIET)
trainer.fit(module, text())
trainer.save_checkpoint("saved.ckpt")
result = {"weights": weights(module), "loss": float(trainer.callback_metrics["loss"])}
torch.save({**result, "saved": weights(Mine.load_from_checkpoint("saved.ckpt"))}, "0.pt")

trainer = pl.Trainer(strategy="ulysses_ring_fork", devices=2, **QUIET)
trainer.fit(module, text())
result = {"weights": weights(module), "loss": float(trainer.callback_metrics["loss"])}
torch.save({**result, "predictions": trainer.predict(module, text())}, "1.pt")
"""
