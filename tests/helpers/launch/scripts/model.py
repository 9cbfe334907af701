"""A Hugging Face Llama of a few thousand weights, and text for it; in float64. Knows nothing of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LENGTH, ROWS, STEPS = 43, 30, 2, 3


class Tiny(pl.LightningModule):
    """An ordinary LightningModule.

    Args:
        rate: the learning rate.
    """

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(5)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.network = LlamaForCausalLM(config).double()
        self.rate = rate
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.network(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.network(input_ids=batch["input_ids"]).logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


def text() -> DataLoader[Any]:
    """Rows of tokens whose labels are spread unevenly."""
    generator = torch.Generator().manual_seed(9)
    rows: list[dict[str, torch.Tensor]] = []
    for row in range(ROWS * STEPS):
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        labels = ids.masked_fill(torch.arange(LENGTH) > 5 * (row + 1), -100)
        rows.append({"input_ids": ids, "labels": labels})
    return DataLoader(rows, batch_size=ROWS)  # type: ignore[arg-type]


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def fit_with_fabric(fabric: Fabric, out: str) -> None:
    """What the Trainer does with ``Tiny``, as a loop; every rank leaves a file in ``out``."""
    network = Tiny().network
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(network, optimizer)
    model.train()
    strategy: Any = fabric.strategy
    losses: list[float] = []
    for batch in fabric.setup_dataloaders(text(), use_distributed_sampler=False):
        loss = model(**strategy.shard_batch(batch)).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(strategy.average(loss)))
    result = {"weights": weights(network), "losses": losses}
    torch.save(result, Path(out) / f"rank{fabric.global_rank}.pt")


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""What the Trainer of every test here is told."""
