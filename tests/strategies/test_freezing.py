"""Layers that are frozen and unfrozen whenever a step, a hook or a window of micro-batches likes to."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.pool import run_ranks
from tests.strategies.small import (
    HYBRID,
    RING,
    ULYSSES,
    Batch,
    Settings,
    Small,
    loader,
    trainer_of,
    weights,
)


def halves(module: pl.LightningModule) -> tuple[list[Any], list[Any]]:
    """The parameters in two parts."""
    parameters = list(module.parameters())
    middle = len(parameters) // 2
    return parameters[:middle], parameters[middle:]


def train_only(module: pl.LightningModule, chosen: int) -> None:
    for index, part in enumerate(halves(module)):
        for parameter in part:
            parameter.requires_grad_(index == chosen)


class InTheStep(Small):
    """Halves take turns, and each step decides for itself."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        train_only(self, batch_idx % 2)
        return self.loss(batch)


class BothInOneStep(Small):
    """Trains one half, then the other, by hand, as generator and discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for index, optimizer in enumerate(optimizers):
            train_only(self, index)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part, lr=0.05) for part in halves(self)]


class BetweenMicroBatches(Small):
    """Halves take turns from micro-batch to micro-batch; a window ends with gradients of both."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        train_only(self, batch_idx % 2)


class WithinAWindow(Small):
    """A half is frozen once it holds gradients that no rank has shared yet."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            train_only(self, 0)


KINDS: dict[str, tuple[type[Small], dict[str, Any]]] = {
    "in the step": (InTheStep, {}),
    "in the step of a window": (InTheStep, {"accumulate_grad_batches": 2}),
    "by hand": (BothInOneStep, {}),
    "between micro-batches": (BetweenMicroBatches, {"accumulate_grad_batches": 3}),
    "within a window": (WithinAWindow, {"accumulate_grad_batches": 2}),
    "for good": (WithinAWindow, {}),
}
UNUSED = {"find_unused_parameters": True}


def fitted(rank: int, world_size: int, settings: Settings | None, kind: str) -> torch.Tensor:
    made, options = KINDS[kind]
    module = made()
    trainer_of(world_size, settings, max_epochs=2, **options).fit(module, loader(8))
    return weights(module)


@lru_cache(maxsize=16)
def alone(kind: str) -> torch.Tensor:
    return run_ranks(1, fitted, None, kind)[0]


@pytest.mark.parametrize("options", [{}, UNUSED], ids=["", "find unused"])
@pytest.mark.parametrize("settings", [RING, ULYSSES, HYBRID], ids=["ring", "ulysses", "hybrid"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_in_one_process(kind: str, settings: Settings, options: Settings) -> None:
    want = alone(kind)
    assert not torch.equal(want, weights(Small())), "nothing was trained"
    ranks = settings["ring_size"] * settings["ulysses_size"]
    for got in run_ranks(ranks, fitted, {**settings, **options}, kind):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
