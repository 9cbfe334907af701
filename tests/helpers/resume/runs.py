"""Runs that are saved at some point and go on, and runs that begin from what was saved."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.strategies.small import LENGTH, VOCAB, Small, trainer_of

Batch = dict[str, torch.Tensor]
ROWS, COUNT = 2, 20


class Rows(Dataset[Batch]):
    """Rows that know their number; a few bits of each are drawn when it is read."""

    def __init__(self, count: int = COUNT) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(0, VOCAB, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Batch:
        ids = self.ids[index].roll(int(torch.randint(0, LENGTH, ())))
        labels = ids.roll(-1).clone()
        labels[: random.randint(0, 9)] = -100
        labels[LENGTH - int(np.random.randint(1, 5)) :] = -100
        return {"input_ids": ids, "labels": labels, "number": torch.tensor([index])}


class Stream(IterableDataset[Batch]):
    """The same rows in order; with ``stateful`` it can tell where it is."""

    def __init__(self) -> None:
        self.rows, self.at = Rows(), 0

    def __iter__(self) -> Any:
        start, self.at = self.at, 0
        for index in range(start, len(self.rows)):
            self.at = index + 1
            yield self.rows[index]
        self.at = 0


class StatefulStream(Stream):
    """Goes on by itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def loader_of(kind: str, rows: int = ROWS) -> DataLoader[Any]:
    """A loader over all rows."""
    generator = torch.Generator().manual_seed(8)
    made: dict[str, Callable[[], DataLoader[Any]]] = {
        "ordered": lambda: DataLoader(Rows(), rows),
        "shuffled": lambda: DataLoader(Rows(), rows, shuffle=True),
        "own generator": lambda: DataLoader(Rows(), rows, shuffle=True, generator=generator),
        "stream": lambda: DataLoader(Stream(), rows),
        "stateful stream": lambda: DataLoader(StatefulStream(), rows),
    }
    return made[kind]()


class Statistics(nn.BatchNorm1d):
    """Running statistics, which batch norm writes without a new version of the tensors; of a number only."""

    context_parallel_local = True

    def __init__(self) -> None:
        super().__init__(1, affine=False)

    def note(self, number: torch.Tensor) -> None:
        self(number * torch.tensor([[0.0], [1.0]]).to(number))


class Dropping(Small):
    """Drops activations at random, logs, validates; notes what it was shown."""

    def __init__(self, train: str = "shuffled") -> None:
        super().__init__()
        self.train_kind = train
        self.losses: list[float] = []
        self.seen: list[list[int]] = []
        self.validated: list[list[float]] = []
        self.register_buffer("count", torch.zeros(()))
        self.statistics = Statistics()
        self.again = self.statistics  # what is loaded last is what counts

    def loss(self, batch: Batch) -> torch.Tensor:
        ids = batch["input_ids"]
        if self.training:
            self.statistics.note(self.get_buffer("count").add_(1))
        positions = batch.get("position_ids", torch.arange(ids.shape[1])[None])
        x = self.model(ids, positions)
        x = F.dropout(x, 0.2, training=self.training)
        return F.cross_entropy(x.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.seen.append(batch["number"].flatten().tolist())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.validated[-1].append(float(loss))
        self.log("val_loss", loss, batch_size=1, sync_dist=True)

    def train_dataloader(self) -> Any:
        return loader_of(self.train_kind)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(6), ROWS)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class SaveAt(pl.Callback):
    """Saves once, in some hook, after so many batches over all epochs."""

    def __init__(self, hook: str, batches: int, path: Path) -> None:
        self.batches, self.path, self.left = batches, path, True
        setattr(self, hook, self.act)

    def act(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Save, if it is time."""
        if trainer.sanity_checking or not self.left:
            return
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batches:
            self.left = False
            trainer.save_checkpoint(self.path)


class Counter(pl.Callback):
    """Counts the batches that were begun, in its state."""

    begun = 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.begun += 1

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begun = state_dict["begun"]


@dataclass
class Outcome:
    """What is compared, bit for bit."""

    losses: list[float] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    validated: list[list[float]] = field(default_factory=list)
    weights: str = ""
    optimizer: str = ""
    random: str = ""
    counters: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


def digest(value: Any) -> str:
    """sha256 of everything in it."""

    def plain(x: Any) -> Any:
        if isinstance(x, DTensor):
            x = x.to_local()
        if isinstance(x, torch.Tensor):
            return [str(x.dtype), list(x.shape), x.detach().numpy().tobytes()]
        if isinstance(x, np.ndarray):
            return x.tobytes()
        if isinstance(x, dict):
            return [(str(k), plain(v)) for k, v in x.items()]
        return [plain(v) for v in x] if isinstance(x, list | tuple) else x

    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()


def outcome_of(trainer: pl.Trainer, module: Any) -> Outcome:
    """At the end of ``fit``."""
    loops: Any = trainer.fit_loop.state_dict()
    loops.pop("state_dict")
    return Outcome(
        module.losses,
        module.seen,
        module.validated,
        digest(module.state_dict()),
        digest(trainer.optimizers[0].state_dict()),
        digest([torch.get_rng_state(), random.getstate(), list(np.random.get_state())]),
        {
            **loops,
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "begun": [x.begun for x in trainer.callbacks if isinstance(x, Counter)],  # type: ignore[attr-defined]
        },
        {name: float(value) for name, value in trainer.callback_metrics.items()},
    )


def run(
    rank: int,
    world: int,
    settings: dict[str, Any],
    save: tuple[str, int, Path] | None = None,
    resume: Path | None = None,
    seed: int = 5,
    train: str = "shuffled",
    kind: type[Dropping] = Dropping,
    **options: Any,
) -> Outcome:
    """Two epochs, from the beginning or from a checkpoint; saved on the way, if asked for."""
    module = kind(train)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    saver = SaveAt(*save) if save else None
    defaults: dict[str, Any] = {"max_epochs": 2}
    callbacks = [Counter(), *([saver] if saver else [])]
    trainer = trainer_of(world, settings, callbacks=callbacks, **{**defaults, **options})
    trainer.fit(module, ckpt_path=resume)
    assert saver is None or not saver.left, "nothing was saved"
    return outcome_of(trainer, module)
