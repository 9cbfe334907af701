"""Training runs whose throughput is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp import ThroughputCallback
from tests.helpers.models.steps import Case, make_model, step
from tests.helpers.strategies.small import trainer_of

VOCAB, LENGTH = 43, 37


@dataclass(frozen=True)
class Run:
    """What is trained: a small Hugging Face model on rows of 37 tokens."""

    settings: dict[str, Any] | None = None
    """Of the strategy; ``None`` is a plain Trainer; ``{"strategy": "ddp"}`` is Lightning's own."""
    model: str = "llama"
    batch: str = "plain"
    """``plain``, ``packed`` or ``padded``."""
    window: int = 0
    accumulate: int = 1
    batches: int = 8
    """Of one process; data ranks share them."""
    checkpoint: str = ""
    freeze: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    """Of the callback."""


def rows_of(run: Run) -> list[dict[str, torch.Tensor]]:
    """Two rows for each batch, all different."""
    generator = torch.Generator().manual_seed(3)
    rows: list[dict[str, torch.Tensor]] = []
    for index in range(2 * run.batches):
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        row = {"input_ids": ids, "labels": ids.clone()}
        if run.batch == "packed":
            row["position_ids"] = torch.arange(LENGTH) % (5 + index)
        elif run.batch == "padded":
            row["attention_mask"] = (torch.arange(LENGTH) < LENGTH - index % 11).long()
            row["labels"] = ids.masked_fill(row["attention_mask"] == 0, -100)
        rows.append(row)
    return rows


def ids_of(row: dict[str, torch.Tensor]) -> torch.Tensor:
    """[S]: the number of each token's document, -1 for padding."""
    if "position_ids" in row:
        return (row["position_ids"] == 0).cumsum(0)
    return row.get("attention_mask", torch.ones(LENGTH)).long() - 1


class Module(pl.LightningModule):
    """Any of the small Hugging Face models of ``tests.nightly.models``."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.case = Case(run.model, window=run.window, checkpoint=run.checkpoint, use_cache=False)
        self.net: nn.Module = make_model(self.case)
        for name, p in self.net.named_parameters():
            p.requires_grad_(not any(part in name for part in run.freeze))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        names = ("attention_mask", "position_ids")
        given = {name: batch[name] for name in names if name in batch}
        return self.net(input_ids=batch["input_ids"], labels=batch["labels"], **given).loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.01)


def trained(rank: int, world_size: int, run: Run) -> dict[str, float]:
    """What was logged last: totals of the run, and rates."""
    callback = ThroughputCallback(**{"every_n_steps": 2, "warmup_steps": 0, **run.options})
    settings = run.settings if run.settings is None else {"labels": "auto", **run.settings}
    ddp = settings is not None and settings.pop("strategy", None) == "ddp"
    trainer = trainer_of(
        world_size,
        {} if ddp else settings,
        **({"strategy": DDPStrategy(process_group_backend="gloo")} if ddp else {}),
        callbacks=[callback],
        log_every_n_steps=1,
        accumulate_grad_batches=run.accumulate,
    )
    rows: Any = rows_of(run)
    size = world_size if ddp else (run.settings or {}).get("data_parallel_size", 1)
    if size > 1:  # each data rank its own batches
        data_rank = rank // (world_size // size)
        rows = [row for at, row in enumerate(rows) if at // 2 % size == data_rank]
    trainer.fit(Module(run), DataLoader(rows, batch_size=2))
    return callback.metrics


__all__ = ["LENGTH", "VOCAB", "Case", "Module", "Run", "ids_of", "rows_of", "step", "trained"]
