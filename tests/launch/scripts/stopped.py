"""A user's script that is sent a signal: ``stopped.py OUT DEVICES SIGNAL RANKS STEP SAVES [CKPT]``.

Each of RANKS (``0,1``) sends SIGNAL to itself within step STEP. SAVES: ``none``, ``file``, ``link`` or
``sharded``; CKPT is what the run goes on from.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cp import UlyssesRingStrategy
from tests.launch.scripts.model import QUIET, Tiny, text, weights


class Signalled(Tiny):
    """Is sent one signal; has an optimizer with a state."""

    def __init__(self, number: int, ranks: list[int], step: int) -> None:
        super().__init__()
        self.signal, self.ranks, self.step = number, ranks, step

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.signal and self.global_rank in self.ranks and self.global_step + 1 == self.step:
            print("SIGNAL SENT", flush=True)
            os.kill(os.getpid(), self.signal)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def callbacks(out: str, saves: str) -> list[Any]:
    """What saves, besides the signal."""
    if saves == "none":
        return []
    last: Any = "link" if saves == "link" else True
    return [ModelCheckpoint(Path(out), filename="{step}", save_last=last, every_n_train_steps=1)]


if __name__ == "__main__":
    out, devices, number, ranks, step, saves, *checkpoint = sys.argv[1:]
    sent = 0 if number == "none" else signal.Signals[number]
    module = Signalled(sent, [int(rank) for rank in ranks.split(",")], int(step))
    settings: dict[str, Any] = {"checkpoint": "sharded"} if saves == "sharded" else {}
    options: dict[str, Any] = {**QUIET, "enable_checkpointing": saves != "none"}
    trainer = pl.Trainer(
        strategy=UlyssesRingStrategy(**settings),
        devices=int(devices),
        default_root_dir=out,
        callbacks=callbacks(out, saves),
        max_epochs=QUIET["max_epochs"] + 1,
        **{name: value for name, value in options.items() if name != "max_epochs"},
    )
    trainer.fit(module, text(), ckpt_path=checkpoint[0] if checkpoint else None)
    state = trainer.optimizers[0].state_dict()["state"]
    result = {"weights": weights(module), "state": state, "steps": trainer.global_step}
    torch.save(result, Path(out) / f"rank{trainer.global_rank}.pt")
