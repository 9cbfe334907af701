"""A user's script; it does not import lightning_cp: ``trainer.py OUT DEVICES NODES STRATEGY``."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

from tests.helpers.launch.scripts.model import QUIET, Tiny, text, weights

if __name__ == "__main__":
    out, devices, nodes, strategy = sys.argv[1:]
    module = Tiny()
    trainer = pl.Trainer(strategy=strategy, devices=int(devices), num_nodes=int(nodes), **QUIET)
    trainer.fit(module, text())
    result = {"weights": weights(module), "losses": module.losses, "rank": trainer.global_rank}
    torch.save(result, Path(out) / f"rank{trainer.global_rank}.pt")
