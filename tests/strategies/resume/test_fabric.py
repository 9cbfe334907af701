"""A Fabric script that is ended and begun again does what it would have done: bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.errors import CheckpointError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.pool import run_ranks
from tests.pool.environment import PoolEnvironment
from tests.strategies.resume.runs import ROWS, Outcome, Rows, Statistics, digest, loader_of
from tests.strategies.small import HYBRID, RING, Small, weights

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
    """A training loop as users write them, with validation after each epoch."""

    def __init__(self, world: int, settings: dict[str, Any], train: str, window: int) -> None:
        settings = {"labels": "aligned", **settings}
        strategy = UlyssesRingStrategy(**settings)
        self.fabric = L.Fabric(
            accelerator="cpu", devices=world, strategy=strategy, plugins=[PoolEnvironment()]
        )
        self.fabric.launch()
        self.strategy, self.window = strategy, window
        module = Small()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        self.model, self.optimizer = self.fabric.setup(Counting(module.model), optimizer)
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
            self.optimizer.step()
            self.optimizer.zero_grad()

    def validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.outcome.validated.append([float(self.loss(batch)) for batch in self.held_out])
        self.model.train()


def run(
    rank: int,
    world: int,
    settings: dict[str, Any],
    save: tuple[int, Path] | None = None,
    resume: Path | None = None,
    seed: int = 5,
    train: str = "shuffled",
    window: int = 1,
) -> Outcome:
    """The script, from its beginning or from a checkpoint."""
    script = Script(world, settings, train, window)
    for draw in (torch.manual_seed, random.seed, np.random.seed):
        draw(seed)
    if resume is not None:
        script.fabric.load(resume, script.state)
    script.run(save)
    outcome = script.outcome
    outcome.weights = digest(script.model.module.state_dict())
    outcome.optimizer = digest(script.optimizer.optimizer.state_dict())
    numbers = [torch.get_rng_state(), random.getstate(), list(np.random.get_state())]
    outcome.random = digest(numbers)
    return outcome


def compare(
    world: int, settings: dict[str, Any], stop: int, since: int, path: Path, **options: Any
) -> None:
    whole = run_ranks(world, run, settings, (stop, path), **options)
    rest = run_ranks(world, run, settings, None, path, 77, **options)
    for one, other in zip(whole, rest, strict=True):
        assert other.seen == one.seen[since:], "samples"
        assert other.losses == one.losses[since:], "losses"
        left = one.validated[len(one.validated) - len(other.validated) :]
        assert repr(other.validated) == repr(left), "validation"
        for name in ("weights", "optimizer", "random"):
            assert getattr(other, name) == getattr(one, name), name


CELLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "mid-epoch": (3, 3, {}),
    "last batch": (10, 10, {}),
    "next epoch": (11, 11, {}),
    "inside a window": (3, 0, {"window": 5}),  # the first one
    "inside a later window": (7, 5, {"window": 5}),
    "inside a window of a later pass": (12, 10, {"window": 5}),
    "stateful stream": (14, 10, {"window": 5, "train": "stateful stream"}),
    "own generator": (13, 13, {"train": "own generator"}),
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "hybrid": (4, HYBRID),
    "data parallel": (4, {**RING, "data_parallel_size": 2}),
    "fsdp": (2, {**RING, "data_parallel": "fsdp"}),
    "one rank reads": (2, {**RING, "batch_sync": "broadcast"}),
}


@pytest.mark.parametrize("name", ["next epoch", "inside a window"])
def test_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    stop, since, options = CELLS[name]
    compare(2, RING, stop, since, tmp_path / "saved.ckpt", **options)


ON_MESHES = [
    (mesh, name)
    for mesh in MESHES
    for name in CELLS
    if (mesh, name) != ("data parallel", "stateful stream")  # its data ranks would read the same
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "name"), ON_MESHES)
def test_on_any_mesh(mesh: str, name: str, tmp_path: Path) -> None:
    stop, since, options = CELLS[name]
    compare(*MESHES[mesh], stop, since, tmp_path / "saved.ckpt", **options)


def other_loaders(rank: int, world: int, path: Path) -> tuple[int, int, list[int], str]:
    """Saved once two loaders are gone; resumed with as many as there are then, and with fewer."""
    script = Script(world, RING, "ordered", 1)
    script.train = script.held_out = None
    train: Any = script.fabric.setup_dataloaders(loader_of("ordered"))
    script.step(next(iter(train)), last=True)
    script.fabric.save(path, script.state)
    del train
    train = script.fabric.setup_dataloaders(loader_of("ordered"))
    script.fabric.load(path, script.state)
    run = script.strategy.run_state
    found = run.epoch(train), run.batches(train), next(iter(train))["number"].flatten().tolist()
    del train
    with pytest.raises(CheckpointError) as refused:
        script.fabric.load(path, script.state)
    return *found, str(refused.value)


def test_loaders_that_are_gone_have_no_place(tmp_path: Path) -> None:
    for *found, message in run_ranks(2, other_loaders, tmp_path / "saved.ckpt"):
        assert found == [0, 1, [2, 3]]
        assert "places of 1 loaders, but there are 0" in message


def too_few(rank: int, world: int, path: Path) -> str:
    script = Script(world, RING, "ordered", 1)
    next(iter(script.train))
    script.fabric.save(path, script.state)
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter += 1  # or what is loaded would be what is there
    more = script.fabric.setup_dataloaders(loader_of("ordered"))
    before = weights(script.model)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as refused:
        script.fabric.load(path, script.state)
    assert torch.equal(weights(script.model), before)  # type: ignore[arg-type]
    assert script.strategy.run_state.batches(more) == 0
    return str(refused.value)


def test_more_loaders_than_were_saved_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, too_few, tmp_path / "saved.ckpt"):
        assert "places of 2 loaders" in message
        assert "there are 3" in message
