"""Classes of long texts by a Hugging Face head, without a change: one label for each row.

Run ``python examples/classification.py``; ``--devices 1`` is one process, and prints the same losses. The
head takes the last token that is not padding; the strategy finds it on whichever rank has it.
"""

import argparse
import warnings

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForSequenceClassification

from lightning_cp import UlyssesRingStrategy

SEQ_LEN, STEPS = 512, 8


def texts() -> list[dict[str, torch.Tensor]]:
    """Rows [4, S] of different lengths, and their classes [4]."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(1, 128, (4, SEQ_LEN), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 200:], mask[3, 470:] = 0, 0
        labels = torch.randint(0, 3, (4,), generator=generator)
        found.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return found


class Classifier(L.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            id2label={0: "good", 1: "bad", 2: "neither"},
            pad_token_id=0,
        )
        self.model = LlamaForSequenceClassification(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
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
        strategy=UlyssesRingStrategy(),
        accelerator="cpu",
        devices=devices,
        precision="64-true",  # so that all printed digits are the same
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(texts(), batch_size=None))  # type: ignore[arg-type]
