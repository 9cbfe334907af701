"""Gradients that ``no_backward_sync`` has left on their ranks are not stepped along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_cp.engines.ddp import UnsyncedGradients
from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import RING, Small, loader, weights


class Script:
    """Two models, each with its own optimizer; a part of the second one is frozen."""

    def __init__(self, world: int, settings: dict[str, Any]) -> None:
        self.strategy = UlyssesRingStrategy(labels="aligned", **settings)
        self.fabric = L.Fabric(
            accelerator="cpu", devices=world, strategy=self.strategy, plugins=[PoolEnvironment()]
        )
        self.fabric.launch()
        self.batches = iter(loader(12))
        self.models, self.optimizers = [], []
        for frozen in (False, True):
            model = Small().model
            model.blocks.requires_grad_(not frozen)
            made = torch.optim.SGD(model.parameters(), lr=0.1)
            wrapped, optimizer = self.fabric.setup(model, made)
            self.models.append(wrapped)
            self.optimizers.append(optimizer)

    def backward(self, which: int = 0, *, kept: bool) -> None:
        batch = self.strategy.shard_batch(next(self.batches))
        model = self.models[which]
        with self.fabric.no_backward_sync(model, enabled=kept):
            ids = batch["input_ids"]
            out = model(ids, batch.get("position_ids", torch.arange(ids.shape[1])[None]))
            loss = F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
            self.fabric.backward(loss)

    def step(self, which: int = 0) -> None:
        self.optimizers[which].step()
        self.optimizers[which].zero_grad()


def off_by_one(script: Script) -> None:
    """A window whose every backward leaves gradients, the last one too."""
    script.backward(kept=True)
    script.backward(kept=False)
    script.step()
    script.backward(kept=True)
    script.backward(kept=True)


def steps(script: Script) -> None:
    off_by_one(script)
    script.step()


def clips(script: Script) -> None:
    off_by_one(script)
    script.fabric.clip_gradients(script.models[0], script.optimizers[0], max_norm=1.0)


def clips_as_pytorch_does(script: Script) -> None:
    """What is left is changed in place, by each rank for itself."""
    off_by_one(script)
    nn.utils.clip_grad_norm_(script.models[0].parameters(), 1e6)
    script.step()


def other_model_averages(script: Script) -> None:
    script.backward(kept=True)
    script.backward(1, kept=False)
    script.step(1)
    script.step()


def refused(rank: int, world: int, settings: dict[str, Any], act: Callable[[Script], None]) -> str:
    script = Script(world, settings)
    with pytest.raises(ConfigError) as error:
        act(script)
    script.optimizers[0].zero_grad()
    script.backward(kept=False)
    script.step()  # it can go on
    return str(error.value)


ENGINES = ("ddp", "fsdp", "zero1")


@pytest.mark.quick("steps-ddp")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("act", [steps, clips, clips_as_pytorch_does, other_model_averages])
def test_a_window_that_is_never_averaged_is_refused(
    act: Callable[[Script], None], engine: str
) -> None:
    for message in run_ranks(2, refused, {**RING, "data_parallel": engine}, act):
        assert "no_backward_sync" in message
        assert "gradients of 12 parameters of this SGD" in message


def another_optimizer(script: Script) -> None:
    script.backward(kept=True)
    script.backward(1, kept=False)
    script.step(1)
    script.backward(kept=False)
    script.step()


def given_up(script: Script) -> None:
    script.backward(kept=True)
    script.optimizers[0].zero_grad()
    script.backward(kept=False)
    script.step()


def averaged_by_hand(script: Script) -> None:
    script.backward(kept=True)
    for parameter in script.models[0].parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(script.fabric.all_reduce(parameter.grad))
    script.step()


def summed_in_place(script: Script) -> None:
    """A collective leaves no trace at a tensor."""
    script.backward(kept=True)
    for parameter in script.models[0].parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    script.step()


def stepped(rank: int, world: int, settings: dict[str, Any], act: Callable[[Script], None]) -> Any:
    script = Script(world, settings)
    act(script)
    return weights(script.models[0])


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("act", [another_optimizer, given_up])
def test_windows_that_are_averaged_in_the_end_step(
    act: Callable[[Script], None], engine: str
) -> None:
    one, other = run_ranks(2, stepped, {**RING, "data_parallel": engine}, act)
    assert torch.equal(one, other)


@pytest.mark.quick("averaged_by_hand-{}", "summed_in_place-{'gradient*", "summed_in_place-{}")
@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("act", [averaged_by_hand, summed_in_place])
def test_what_was_averaged_by_hand_is_stepped_along(
    act: Callable[[Script], None], settings: dict[str, Any]
) -> None:
    one, other = run_ranks(2, stepped, {**RING, **settings}, act)
    assert torch.equal(one, other)
    assert not torch.equal(one, weights(Small().model))


def test_one_process_has_nothing_to_average() -> None:
    run_ranks(1, stepped, {}, steps)


def test_only_what_a_backward_has_left_is_kept_back() -> None:
    module, kept = (
        nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"}),
        UnsyncedGradients(),
    )
    parameters = list(module.parameters())

    def backward(name: str, *, averages: bool) -> list[bool]:
        kept.begin_backward(module, averages=averages)
        module[name](torch.ones(2)).sum().backward()
        found = {id(p) for p in kept.unaveraged(parameters)}
        return [id(p) in found for p in parameters]

    assert backward("a", averages=True) == [False, False]
    assert backward("b", averages=False) == [False, True]
    assert backward("a", averages=False) == [True, True]
    parameters[1].grad = None
    assert backward("a", averages=False) == [True, False]
    assert backward("a", averages=False) == [True, False]
    assert backward("b", averages=True) == [False, False]
