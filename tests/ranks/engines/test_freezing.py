"""Layers that are frozen and unfrozen whenever a step, a hook or a window of micro-batches likes to."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
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


class BeforeBackward(Small):
    """A hook freezes, in turns, what the forward has used already; momentum moves no frozen layer."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self.global_step > 1:
            train_only(self, self.global_step % 2)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        return self.loss(batch)


class ForTheForward(Small):
    """A half is frozen while the loss is computed, and not before or after."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        train_only(self, 1)
        loss = self.loss(batch)
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        return loss


class PartByHand(BothInOneStep):
    """The last layer's gradient is left out of the first of two losses; then the layer is frozen."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        last = list(self.parameters())[-1]
        for optimizer, trained in ((first, True), (second, False)):
            last.requires_grad_(trained)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) if not trained else self.without(batch, last))
            optimizer.step()

    def without(self, batch: Batch, left_out: torch.nn.Parameter) -> torch.Tensor:
        """The loss of a step that does not train a parameter, which takes part all the same."""
        left_out.requires_grad_(False)
        loss = self.loss(batch)
        left_out.requires_grad_(True)
        return loss


class Toggled(BothInOneStep):
    """Both optimizers are toggled, as Lightning recommends, and only then do they step."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for weight, optimizer in enumerate(optimizers, start=1):
            self.toggle_optimizer(optimizer)
            self.manual_backward(weight * self.loss(batch))
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class AfterTheStep(BothInOneStep):
    """At its end a step says what the next one trains."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        train_only(self, batch_idx % 2)


class AtTheEnd(Small):
    """The last step leaves a layer out, and no forward comes after it."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        last = list(self.parameters())[-1]
        last.requires_grad_(self.global_step + 1 < self.trainer.num_training_batches)
        loss = self.loss(batch)
        last.requires_grad_(True)
        return loss


KINDS: dict[str, tuple[type[Small], dict[str, Any]]] = {
    "in the step": (InTheStep, {}),
    "in the step of a window": (InTheStep, {"accumulate_grad_batches": 2}),
    "by hand": (BothInOneStep, {}),
    "between micro-batches": (BetweenMicroBatches, {"accumulate_grad_batches": 3}),
    "within a window": (WithinAWindow, {"accumulate_grad_batches": 2}),
    "for good": (WithinAWindow, {}),
    "before backward": (BeforeBackward, {}),
}
MORE: dict[str, tuple[type[Small], dict[str, Any]]] = {
    "toggled": (Toggled, {}),
    "after the step": (AfterTheStep, {}),
}
"""What is harder for parameters that are sharded between steps."""
PARTS: dict[str, tuple[type[Small], dict[str, Any]]] = {
    "frozen for the forward": (ForTheForward, {}),
    "a part by hand": (PartByHand, {}),
    "at the end": (AtTheEnd, {"max_epochs": 1}),
}
"""Steps of which DistributedDataParallel has to be told that they use parts of the model."""
UNUSED = {"find_unused_parameters": True}


def fitted(rank: int, world_size: int, settings: Settings | None, kind: str) -> torch.Tensor:
    made, options = (KINDS | MORE | PARTS)[kind]
    module = made()
    trainer_of(world_size, settings, **{"max_epochs": 2, **options}).fit(module, loader(8))
    return weights(module)


@lru_cache(maxsize=16)
def alone(kind: str) -> torch.Tensor:
    return run_ranks(1, fitted, None, kind)[0]


@pytest.mark.quick("in the step-ulysses-")
@pytest.mark.parametrize("options", [{}, UNUSED], ids=["", "find unused"])
@pytest.mark.parametrize(
    "settings",
    [pytest.param(RING, marks=pytest.mark.nightly), ULYSSES, HYBRID],
    ids=["ring", "ulysses", "hybrid"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_as_in_one_process(kind: str, settings: Settings, options: Settings) -> None:
    want = alone(kind)
    assert not torch.equal(want, weights(Small())), "nothing was trained"
    ranks = settings["ring_size"] * settings["ulysses_size"]
    for got in run_ranks(ranks, fitted, {**settings, **options}, kind):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_the_model_as_in_one_process(kind: str) -> None:
    for got in run_ranks(2, fitted, {**RING, **UNUSED}, kind):
        torch.testing.assert_close(got, alone(kind), rtol=0, atol=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, engine) for kind in [*KINDS, *MORE, *PARTS] for engine in ("fsdp", "zero1")),
        *((kind, "ddp") for kind in MORE),
    ],
)
def test_every_engine_as_in_one_process(kind: str, engine: str) -> None:
    for got in run_ranks(2, fitted, {**RING, "data_parallel": engine}, kind):
        torch.testing.assert_close(got, alone(kind), rtol=0, atol=1e-10)


@pytest.mark.quick("a part by hand", "at the end")
@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_the_model_are_refused_if_nobody_said_so(kind: str) -> None:
    """At once: the ranks would go apart, and say so a step later, or never."""
    match = r"no gradient to some parameters that are trained \(.+\).*find_unused_parameters=True"
    expect_on_every_rank(2, fitted, RING, kind, error=ConfigError, match=match)


class BySomeRanksOnly(ContextParallelMixin, Small):  # type: ignore[misc]
    """A frozen model, a trained head, and a trained vector for the first tokens, which one rank has."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.model.head.weight.requires_grad_(True)
        self.prompt = torch.nn.Parameter(torch.zeros(self.model.embed.weight.shape[1]))
        self.model.embed.register_forward_hook(self.add)

    def add(self, module: Any, args: Any, x: torch.Tensor) -> torch.Tensor:
        first = self.token_positions(x, dim=1) < 3
        return x + self.prompt * first.unsqueeze(-1) if bool(first.any()) else x


def train_prompt(rank: int, world_size: int) -> None:
    trainer_of(world_size, {**RING, **UNUSED}, max_epochs=1).fit(BySomeRanksOnly(), loader(2))


def test_backward_through_attention_on_some_ranks_only_is_refused() -> None:
    match = r"other attention calls on some .*rank 0: calls \[0\], rank 1: calls \[\]"
    expect_on_every_rank(2, train_prompt, error=ConfigError, match=match)
