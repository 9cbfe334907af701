"""From a Hugging Face checkpoint and back: load, train two processes on shared sequences, export.

Run ``python examples/pretrained.py CHECKPOINT NEW``. CHECKPOINT is an existing folder; the program creates
NEW. ``--devices 1`` is one process, and prints the same losses.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_cp import UlyssesRingStrategy
from lightning_cp.checkpoint import export_pretrained

SEQ_LEN, STEPS = 512, 60


def rows() -> list[dict[str, torch.Tensor]]:
    """Words of ``argparse``'s source, in bytes. Labels are the same bytes: Hugging Face models shift them."""
    words = " ".join(Path(argparse.__file__).read_text().split())
    cuts = torch.tensor(list(words.encode()))[: STEPS * SEQ_LEN].split(SEQ_LEN)
    return [{"input_ids": cut, "labels": cut.clone()} for cut in cuts]


class Model(L.LightningModule):
    """The checkpoint's model, without memory until each rank reads its own part."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.network = path, None

    def configure_model(self) -> None:
        if self.network is None:
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(self.path)
                self.network = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        network: Any = self.network
        loss = network(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.trainer.is_global_zero and self.global_step % 10 == 0:
            print(f"step {self.global_step}  loss {self.trainer.callback_metrics['loss']:.5f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("new")
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", r".*does not have many workers.*|.*LeafSpec.*")
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=UlyssesRingStrategy(data_parallel="fsdp", pretrained=arguments.checkpoint),
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(arguments.checkpoint)
    trainer.fit(model, DataLoader(rows()))  # type: ignore[arg-type]
    export_pretrained(model, arguments.new)  # every rank calls it
