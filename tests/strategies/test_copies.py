"""Trainers, and what refers to them, can be copied and pickled, in a run and after it, as with DDP."""

from __future__ import annotations

import copy
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.pool import run_ranks
from tests.strategies.small import (
    HYBRID,
    RING,
    ULYSSES,
    Settings,
    Small,
    Staged,
    loader,
    trainer_of,
    weights,
)
from tests.strategies.test_fabric import fabric_of
from tests.suites import slow_but

WAYS: dict[str, tuple[int, Settings]] = {
    "ring": (2, RING),
    "ring 3": (3, {"ring_size": 3, "ulysses_size": 1}),
    "ulysses": (2, ULYSSES),
    "hybrid": (4, HYBRID),
    "alone": (1, {"context_parallel_size": 1}),
}


class Copies(pl.Callback):
    """Copies itself, and the Trainer that it refers to, in every kind of stage."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.trainer = trainer

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        copied = copy.deepcopy(self)
        assert copied.trainer is not self.trainer
        assert copied.trainer.global_step == self.trainer.global_step

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        copy.deepcopy(self)


def pickled(thing: Any) -> Any:
    """What comes back of a file."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def fit(rank: int, world_size: int, settings: Settings) -> tuple[torch.Tensor, ...]:
    """Weights after two fits: of a Trainer, of a copy that was made before, and of copies made after one."""
    callback = Copies()
    trainer: Any = trainer_of(world_size, settings, callbacks=[callback], max_epochs=2)
    before = copy.deepcopy(trainer)
    module, again = Staged(), Staged()
    trainer.fit(module, loader(4), loader(2))
    before.fit(again, loader(4), loader(2))
    found = [weights(module), weights(again)]
    for made in (copy.deepcopy(trainer), pickled(trainer), copy.deepcopy(callback)):
        of_it: Any = getattr(made, "trainer", made)
        assert of_it.strategy._core is not trainer.strategy._core
        copied = of_it.lightning_module
        assert torch.equal(weights(copied), found[0])
        of_it.fit_loop.max_epochs = 3
        of_it.fit(copied, loader(4), loader(2))
        found.append(weights(copied))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(4), loader(2))
    return *found, weights(module)


@pytest.mark.parametrize("way", slow_but("ring", "alone", of={name: name for name in WAYS}))
def test_copies_train_as_the_trainer_does(way: str) -> None:
    ranks, settings = WAYS[way]
    for first, again, *copies, last in run_ranks(ranks, fit, settings, timeout=120):
        assert torch.equal(again, first)
        assert not torch.equal(last, first)
        for one in copies:
            assert torch.equal(one, last)


def fabric(rank: int, world_size: int, settings: Settings) -> int:
    """A module that refers to its Fabric."""
    made = fabric_of(world_size, settings)
    made.launch()
    module = made.setup(Small())
    copied = copy.deepcopy(module.module)
    assert torch.equal(weights(copied), weights(module))
    own: Any = made.strategy
    other: Any = copy.deepcopy(made).strategy
    assert other._core is not own._core
    assert other._core.ask_for_counts == own._core.ask_for_counts
    return len(list(copied.parameters()))


@pytest.mark.slow
def test_a_module_of_fabric() -> None:
    assert all(run_ranks(2, fabric, RING))
