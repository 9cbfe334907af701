"""Loops of one's own that freeze, unfreeze and discard within steps and windows, on engines that shard."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING, Settings, close, loader, weights
from tests.ranks.strategies.test_fabric import fabric_of, model_of

WINDOW = 2


class Script:
    """What a loop does besides training; nothing. ``model`` is the user's own."""

    def begins(self, model: Any) -> None:
        """Before the loop."""

    def before_forward(self, model: Any, index: int) -> None:
        """In every micro-batch."""

    def before_backward(self, model: Any, index: int) -> None:
        """The loss is there."""

    def after_backward(self, model: Any, optimizer: Any, index: int) -> None:
        """Gradients are kept back in every first micro-batch of a window."""


def train_only(model: nn.Module, trained: set[int]) -> None:
    """Halves of the parameters."""
    parameters = list(model.parameters())
    for at, parameter in enumerate(parameters):
        parameter.requires_grad_(at * 2 // len(parameters) in trained)


class TakingTurns(Script):
    def before_forward(self, model: Any, index: int) -> None:
        train_only(model, {index % 2})


class WithinAWindow(Script):
    """A half is frozen once it has gradients that no rank has shared yet."""

    def before_forward(self, model: Any, index: int) -> None:
        train_only(model, {0, 1} if index % WINDOW == 0 else {index // WINDOW % 2})


class BetweenForwardAndBackward(Script):
    def before_forward(self, model: Any, index: int) -> None:
        train_only(model, {0, 1})

    def before_backward(self, model: Any, index: int) -> None:
        train_only(model, {index // 2 % 2})


class ThawingInTheStep(Script):
    """What was never trained is, from the middle of a step on: that step has no gradient of it."""

    def begins(self, model: Any) -> None:
        train_only(model, {1})

    def before_backward(self, model: Any, index: int) -> None:
        train_only(model, {0, 1} if index >= 2 else {1})


class Discarding(Script):
    """The gradients of two first micro-batches are thrown away."""

    def after_backward(self, model: Any, optimizer: Any, index: int) -> None:
        if index in (2, 4):
            optimizer.zero_grad()


SCRIPTS = (TakingTurns, WithinAWindow, BetweenForwardAndBackward, ThawingInTheStep, Discarding)


def trained(rank: int, world_size: int, settings: Settings | None, kind: Any) -> torch.Tensor:
    script: Script = kind()
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    plain = model_of()
    script.begins(plain)
    strategy: Any = fabric.strategy
    setup: Any = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    model, optimizer = setup
    for index, batch in enumerate(loader(16)):
        batch = batch if settings is None else strategy.shard_batch(batch)
        kept = index % WINDOW == 0 and settings is not None
        with fabric.no_backward_sync(model, enabled=kept):
            script.before_forward(plain, index)
            ids = batch["input_ids"]
            logits = model(ids, batch.get("position_ids", torch.arange(ids.shape[1])[None]))
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            script.before_backward(plain, index)
            fabric.backward(loss)
            script.after_backward(plain, optimizer, index)
        if index % WINDOW == WINDOW - 1:
            optimizer.step()
            optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
    return weights(plain)


@lru_cache(maxsize=8)
def alone_trained(kind: Any) -> torch.Tensor:
    return run_ranks(1, trained, None, kind)[0]


QUICK = {("fsdp", ThawingInTheStep), ("fsdp", Discarding)}
CASES = [
    pytest.param(
        engine,
        kind,
        id=f"{engine} {kind.__name__}",
        marks=() if (engine, kind) in QUICK else pytest.mark.nightly,
    )
    for kind in SCRIPTS
    for engine in ("fsdp", "zero1")
]


@pytest.mark.parametrize(("engine", "kind"), CASES)
def test_as_in_one_process(engine: str, kind: Any) -> None:
    for got in run_ranks(2, trained, {**RING, "data_parallel": engine}, kind):
        close(got, alone_trained(kind))


@pytest.mark.nightly
def test_discarded_gradients_of_ddp() -> None:
    for got in run_ranks(2, trained, RING, Discarding):
        close(got, alone_trained(Discarding))


@pytest.mark.nightly
def test_scripts_differ() -> None:
    results = [alone_trained(kind) for kind in (Script, *SCRIPTS)]
    for at, one in enumerate(results):
        assert not any(torch.equal(one, other) for other in results[:at])
