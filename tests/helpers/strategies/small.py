"""A module and a Trainer small enough to be run many times, in one process or in the standing ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_cp import UlyssesRingStrategy
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.plain_llama import PlainLlama

Batch = Any
Settings = dict[str, Any]
RING: Settings = {"ring_size": 2, "ulysses_size": 1}
RING3: Settings = {"ring_size": 3, "ulysses_size": 1}
ULYSSES: Settings = {"ring_size": 1, "ulysses_size": 2}
HYBRID: Settings = {"ring_size": 2, "ulysses_size": 2}
VOCAB, LENGTH = 48, 29  # a length that divides by nothing
LET_EMPTY = pytest.mark.filterwarnings("ignore:a batch has no valid label at all:UserWarning")
"""For modules of tests: some samples have no targets on any rank."""


class Small(pl.LightningModule):
    """One layer of a Llama, aligned labels, torch's cross-entropy; 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        torch.set_default_dtype(torch.float64)
        self.model = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=1)

    def logits(self, batch: Batch) -> torch.Tensor:
        """[B, L, vocab]."""
        ids = batch["input_ids"]
        return self.model(ids, batch.get("position_ids", torch.arange(ids.shape[1])[None]))

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean over targets."""
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.logits(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Staged(Small):
    """Validates and tests as well."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=1, sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=1, sync_dist=True)


def samples(count: int, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    """Rows whose targets are spread unevenly; in every third pair most ranks have none."""
    generator = torch.Generator().manual_seed(count)
    found: list[dict[str, torch.Tensor]] = []
    for index in range(count):
        ids, labels = torch.randint(0, VOCAB, (2, length), generator=generator)
        labels[torch.rand(length, generator=generator) < 0.3] = -100
        if index // 2 % 3 == 2:
            labels[5:] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def loader(count: int, rows: int = 2, **options: Any) -> DataLoader[Any]:
    """Samples in order."""
    return DataLoader(samples(count), batch_size=rows, **options)  # type: ignore[arg-type]


def alone() -> None:
    """From here on this process has never heard of others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def trainer_of(world_size: int, settings: dict[str, Any] | None, **options: Any) -> pl.Trainer:
    """A quiet Trainer; ``settings`` are the strategy's, ``None`` is a plain Trainer in one process."""
    strategy: Any = "auto"
    if settings is None:
        alone()
    else:
        strategy = UlyssesRingStrategy(**{"labels": "aligned", **settings})
    quiet: dict[str, Any] = {
        "max_epochs": 1,
        "plugins": [] if settings is None else [PoolEnvironment()],
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(
        accelerator=options.pop("accelerator", "cpu"),
        devices=world_size,
        strategy=options.pop("strategy", strategy),
        **{**quiet, **options},
    )


def weights(module: nn.Module) -> torch.Tensor:
    """All parameters in one vector; every rank has to ask where they are spread."""
    return torch.cat([whole(p.detach()).flatten() for p in module.parameters()]).clone()


def whole(x: torch.Tensor) -> torch.Tensor:
    """All of a tensor, of which ranks may hold parts; every rank must ask."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(got: Any, want: Any) -> None:
    """Equal but for the order of additions in float64."""
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
