"""A reward model: the better answer of a pair has the larger value at its last token.

Run ``python examples/reward.py``; ``--devices 1`` is one process, and prints the same losses. New here:
``self.sequence_pick``: the values of one token of each row, whichever rank has it; -1 is the last token that
is not padding.
"""

import argparse
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaModel

from lightning_cp import ContextParallelMixin, UlyssesRingStrategy

SEQ_LEN, STEPS = 512, 8


def pairs() -> list[dict[str, torch.Tensor]]:
    """Rows [2, S] of different lengths, the better one first."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(1, 128, (2, SEQ_LEN), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 400:], mask[1, 470:] = 0, 0
        found.append({"input_ids": ids * mask, "attention_mask": mask})
    return found


class Reward(ContextParallelMixin, L.LightningModule):
    """A model without a head, and one value per token."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        self.model = LlamaModel(config)
        self.head = torch.nn.Linear(64, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        hidden = self.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        better, worse = self.sequence_pick(self.head(hidden).squeeze(-1), -1)
        loss = -F.logsigmoid(better - worse)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(f"step {self.global_step}  loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    devices = parser.parse_args().devices
    warnings.filterwarnings("ignore", r".*does not have many workers.*|.*LeafSpec.*")
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=UlyssesRingStrategy(labels="none"),
        accelerator="cpu",
        devices=devices,
        precision="64-true",  # so that all printed digits are the same
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Reward(), DataLoader(pairs(), batch_size=None))  # type: ignore[arg-type]
