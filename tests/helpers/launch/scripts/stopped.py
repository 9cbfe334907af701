"""A user's script that is sent a signal: ``stopped.py OUT DEVICES SIGNAL RANKS STEP SAVES [CKPT]``.

Each of RANKS (``0,1``) sends SIGNAL to itself within step STEP, or rank 0 to the process that has started it
(``parent``). SAVES: ``none``, ``file``, ``link`` or ``sharded``; CKPT is what the run goes on from. The
variable ``START_METHOD`` is the strategy's.
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
from tests.helpers.launch.scripts.model import QUIET, Tiny, text, weights

EPOCHS = QUIET["max_epochs"] + 1


def send(name: str, who: str, rank: int, *, here: bool) -> None:
    """Send the signal, if this is the place and one of the ranks that do."""
    if not here or name == "none" or str(rank) not in who.replace("parent", "0").split(","):
        return
    print("SIGNAL SENT", flush=True)
    os.kill(os.getppid() if who == "parent" else os.getpid(), signal.Signals[name])


class Signalled(Tiny):
    """Is sent one signal; has an optimizer with a state."""

    def __init__(self, name: str, who: str, step: int) -> None:
        super().__init__()
        self.signal, self.who, self.step = name, who, step

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        here = self.global_step + 1 == self.step
        send(self.signal, self.who, self.global_rank, here=here)
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
    out, devices, name, who, step, saves, *checkpoint = sys.argv[1:]
    module = Signalled(name, who, int(step))
    settings: dict[str, Any] = {"checkpoint": "sharded"} if saves == "sharded" else {}
    settings["start_method"] = os.environ.get("START_METHOD", "popen")
    options: dict[str, Any] = {**QUIET, "enable_checkpointing": saves != "none"}
    trainer = pl.Trainer(
        strategy=UlyssesRingStrategy(**settings),
        devices=int(devices),
        default_root_dir=out,
        callbacks=callbacks(out, saves),
        **{**options, "max_epochs": EPOCHS},
    )
    trainer.fit(module, text(), ckpt_path=checkpoint[0] if checkpoint else None)
    state = trainer.optimizers[0].state_dict()["state"]
    result = {"weights": weights(module), "state": state, "steps": trainer.global_step}
    torch.save(result, Path(out) / f"rank{trainer.global_rank}.pt")
