"""Fabric scripts that are saved at some point and go on, and those that begin from what was saved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.resume.runs import ROWS, Outcome, Rows, Statistics, digest, loader_of
from tests.helpers.strategies.small import Small

EPOCHS = 2


class Counting(nn.Module):
    """Counts the batches that it was trained on, in buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("count", torch.zeros(()))
        self.statistics = Statistics()
        self.again = self.statistics

    def forward(self, *args: Any) -> Any:
        if self.training:
            self.statistics.note(self.get_buffer("count").add_(1))
        return self.model(*args)


class Script:
    """A training loop as users write them, with validation after each epoch.

    Args:
        world: ranks.
        settings: of the strategy.
        train: which loader.
        window: batches of a step.
        steps: through Fabric's wrapper, past it, or with an optimizer that Fabric was never given.
    """

    def __init__(
        self,
        world: int,
        settings: dict[str, Any],
        train: str,
        window: int,
        steps: str = "wrapped",
    ) -> None:
        settings = {"labels": "aligned", **settings}
        strategy = UlyssesRingStrategy(**settings)
        self.fabric = L.Fabric(
            accelerator="cpu", devices=world, strategy=strategy, plugins=[PoolEnvironment()]
        )
        self.fabric.launch()
        self.strategy, self.window = strategy, window
        module = Small()
        self.steps = steps
        if steps == "unknown":
            self.model: Any = self.fabric.setup(Counting(module.model))
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.optimizer: Any = optimizer
        else:
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
            self.model, self.optimizer = self.fabric.setup(Counting(module.model), optimizer)
        self.plain_optimizer = optimizer
        rows = ROWS // strategy.data_parallel_size  # an epoch has as many batches on every mesh
        self.train, self.held_out = self.fabric.setup_dataloaders(
            loader_of(train, rows), DataLoader(Rows(6), rows)
        )
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "run": self.strategy.run_state,
        }
        self.outcome = Outcome()

    def run(self, save: tuple[int, Path] | None) -> None:
        """From where it is to the end; saved after so many batches of this process."""
        run, count = self.strategy.run_state, 0
        for _ in range(run.epoch(self.train), EPOCHS):
            for index, batch in enumerate(self.train, run.batches(self.train)):
                self.step(batch, last=(index + 1) % self.window == 0)
                count += 1
                if save and count == save[0]:
                    self.fabric.save(save[1], self.state)
            self.validate()

    def loss(self, batch: Any) -> torch.Tensor:
        batch = self.strategy.shard_batch(batch)
        x = F.dropout(
            self.model(batch["input_ids"], batch["position_ids"]), 0.2, self.model.training
        )
        return F.cross_entropy(x.flatten(0, 1), batch["labels"].flatten())

    def step(self, batch: Any, *, last: bool) -> None:
        self.outcome.seen.append(batch["number"].flatten().tolist())
        with self.fabric.no_backward_sync(self.model, enabled=not last):
            loss = self.loss(batch)
            self.fabric.backward(loss / self.window)
        self.outcome.losses.append(float(loss.detach()))
        if last:
            optimizer = self.optimizer if self.steps == "wrapped" else self.plain_optimizer
            optimizer.step()
            optimizer.zero_grad()

    def validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.outcome.validated.append([float(self.loss(batch)) for batch in self.held_out])
        self.model.train()


class Ahead(Script):
    """Reads the next batch once the one before was stepped along, and saves with that at hand."""

    def run(self, save: tuple[int, Path] | None) -> None:
        run, count = self.strategy.run_state, 0
        for _ in range(run.epoch(self.train), EPOCHS):
            batches = iter(self.train)
            batch = next(batches)
            while batch is not None:
                self.step(batch, last=True)
                batch = next(batches, None)
                count += 1
                if save and count == save[0]:
                    self.fabric.save(save[1], self.state)
            self.validate()


def run(
    rank: int,
    world: int,
    settings: dict[str, Any],
    save: tuple[int, Path] | None = None,
    resume: Path | None = None,
    seed: int = 5,
    train: str = "shuffled",
    window: int = 1,
    steps: str = "wrapped",
    ahead: bool = False,
) -> Outcome:
    """The script, from its beginning or from a checkpoint."""
    script = (Ahead if ahead else Script)(world, settings, train, window, steps)
    for draw in (torch.manual_seed, random.seed, np.random.seed):
        draw(seed)
    if resume is not None:
        script.fabric.load(resume, script.state)
    script.run(save)
    outcome = script.outcome
    outcome.weights = digest(script.model.module.state_dict())
    outcome.optimizer = digest(script.plain_optimizer.state_dict())
    numbers = [torch.get_rng_state(), random.getstate(), list(np.random.get_state())]
    outcome.random = digest(numbers)
    return outcome
