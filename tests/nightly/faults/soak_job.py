"""A training run that is killed and started again: ``soak_job.py FOLDER STEPS SAVE_EVERY``, under torchrun.

Shuffled data, dropout and AdamW: what the run goes on from has to hold the random numbers, the place in the
data and the optimizer's state, or the weights at the end are others. The ranks are four: two share a sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_cp import UlyssesRingStrategy

VOCAB, LENGTH, WIDTH, HEADS = 32, 16, 16, 4
ROWS = 240
"""In an epoch; a step takes two."""


class Rows(Dataset[Any]):
    """Random tokens, the same in every process."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


class Job(pl.LightningModule):
    """One block of attention behind dropout; rank 0 writes down every loss."""

    def __init__(self, losses: Path) -> None:
        super().__init__()
        self.losses = losses
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.drop = nn.Dropout(0.1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = self.drop(self.embedding(batch["input_ids"]) + self.positions(batch["position_ids"]))
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(self.out(self.drop(x)).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            line = [self.global_step, float(self.trainer.callback_metrics["loss"])]
            with self.losses.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def digest(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of weights and the optimizer's state, bit by bit."""
    made = hashlib.sha256()
    for parameter in module.parameters():
        made.update(parameter.detach().numpy().tobytes())
        for name, value in sorted(optimizer.state[parameter].items()):
            made.update(name.encode() + value.numpy().tobytes())
    return made.hexdigest()


def main() -> None:
    """Train to the end, from the last checkpoint if there is one."""
    folder, steps, save_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    pl.seed_everything(7, verbose=False)
    job = Job(folder / "losses.jsonl")
    saves = ModelCheckpoint(folder / "saves", save_last=True, every_n_train_steps=save_every)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=UlyssesRingStrategy(data_parallel_size=2, labels="aligned", num_heads=HEADS),
        max_steps=steps,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(job, DataLoader(Rows(), batch_size=1, shuffle=True), ckpt_path="last")
    assert trainer.global_step == steps
    (folder / f"end{rank}").write_text(digest(job, trainer.optimizers[0]))


if __name__ == "__main__":
    main()
