"""Context parallelism in your own script: one word.

A small Llama reads the source of ``argparse`` byte by byte, 2048 bytes at a time, on four processes
that share every sequence. Run it with ``python examples/trainer_minimal.py``. The same file with
``strategy="auto"`` and ``devices=1`` prints the same losses, up to rounding.
"""

import argparse
import warnings
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_cp  # noqa: F401 - registers strategy="ulysses_ring"

SEQ_LEN, STEPS = 2048, 20


class Source(Dataset[dict[str, torch.Tensor]]):
    """The file, cut into sequences. Labels are the same bytes: Hugging Face models shift them."""

    def __init__(self) -> None:
        self.bytes = torch.tensor(list(Path(argparse.__file__).read_bytes()))

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sequence = self.bytes[index * SEQ_LEN : (index + 1) * SEQ_LEN]
        return {"input_ids": sequence, "labels": sequence.clone()}


class Model(L.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
        )
        self.network = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.network(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(f"step {self.global_step:2d}  loss {self.trainer.callback_metrics['loss']:.8f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", r".*does not have many workers.*|.*LeafSpec.*")
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy="ulysses_ring",
        accelerator="cpu",
        devices=4,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(Source(), batch_size=1))
