"""Context parallelism of a plain PyTorch model: its two settings, and the source of positions.

Two processes share sequences of 512 bytes. Run it with ``python examples/trainer_plain.py``; with
``devices=1`` it prints the same losses, up to rounding.
"""

import argparse
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp import UlyssesRingStrategy

SEQ_LEN, STEPS = 512, 10


def rows() -> list[dict[str, torch.Tensor]]:
    """Every byte's label is the byte after it: shifted here, on whole sequences."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    cuts = [text[start : start + SEQ_LEN + 1] for start in range(0, STEPS * SEQ_LEN, SEQ_LEN)]
    return [{"input_ids": cut[:-1], "labels": cut[1:]} for cut in cuts]


class Model(L.LightningModule):
    """One layer of attention with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 64), nn.Embedding(SEQ_LEN, 64)
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 256)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        # This rank's tokens only, so their positions are the batch's, and not 0, 1, 2, ...
        x = self.tokens(batch["input_ids"]) + self.places(batch["position_ids"])
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # over the whole sequence
        logits = self.head(x + y.transpose(1, 2).flatten(2))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(f"step {self.global_step:2d}  loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", r".*does not have many workers.*|.*LeafSpec.*")
    L.seed_everything(0, verbose=False)
    # A plain model tells neither how many heads it has nor how it reads its labels.
    strategy = UlyssesRingStrategy(num_heads=4, labels="aligned")
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(rows()))  # type: ignore[arg-type]
