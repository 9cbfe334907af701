"""token_weighting="global": every target of a window weighs the same, over data ranks and micro-batches.

The oracle is a loop written by hand for one process: it runs through all batches of a window, adds up
the losses of all their targets and divides once by their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from lightning_cp.loss.accumulation import AccumulatedTokens
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import (
    LENGTH,
    LET_EMPTY,
    Batch,
    Settings,
    Small,
    alone,
    close,
    samples,
    trainer_of,
    weights,
)

pytestmark = LET_EMPTY
ROWS = 2


@dataclass(frozen=True)
class Plan:
    """How a run goes through its data; the last window may be short."""

    data_ranks: int
    window: int
    batches: int = 7
    clip: float | None = 0.05

    def data(self) -> list[dict[str, torch.Tensor]]:
        """Targets differ a lot from batch to batch; the fifth has none on the first data rank."""
        rows = samples(self.batches * ROWS * self.data_ranks)
        for index, row in enumerate(rows):
            batch = index // self.data_ranks // ROWS
            row["labels"][3 * batch + 4 :] = -100
            if batch == 4 and index % self.data_ranks == 0:
                row["labels"][:] = -100
        return rows

    def loader(self, data_rank: int) -> DataLoader[Any]:
        """What one data rank reads."""
        data: Any = self.data()
        sampler = DistributedSampler(data, self.data_ranks, data_rank, shuffle=False)
        return DataLoader(data, batch_size=ROWS, sampler=sampler)


def by_hand(rank: int, world_size: int, plan: Plan) -> torch.Tensor:
    """One process, plain PyTorch."""
    alone()
    module = Small()
    optimizer = module.configure_optimizers()
    steps: list[Any] = list(
        zip(*(plan.loader(rank) for rank in range(plan.data_ranks)), strict=True)
    )
    for first in range(0, len(steps), plan.window):
        window = [batch for step in steps[first : first + plan.window] for batch in step]
        targets = sum(int((batch["labels"] != -100).sum()) for batch in window)
        for batch in window:
            logits, labels = module.logits(batch).flatten(0, 1), batch["labels"].flatten()
            (F.cross_entropy(logits, labels, reduction="sum") / targets).backward()
        if plan.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), plan.clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@lru_cache(maxsize=16)
def want(plan: Plan) -> torch.Tensor:
    return run_ranks(1, by_hand, plan)[0]


class Reported(Small):
    """Sees the gradients that will be stepped along, as a user's hooks do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.norms = [*getattr(self, "norms", []), float(torch.stack(grads).norm())]


def settings_of(data_ranks: int, **more: Any) -> Settings:
    return {"data_parallel_size": data_ranks, "token_weighting": "global", **more}


def trained(rank: int, world_size: int, plan: Plan, more: Settings) -> torch.Tensor:
    module = Reported()
    trainer = trainer_of(
        world_size,
        settings_of(plan.data_ranks, **more),
        accumulate_grad_batches=plan.window,
        gradient_clip_val=plan.clip,
    )
    trainer.fit(module, plan.loader(rank // (world_size // plan.data_ranks)))
    return weights(module)


RING2: Settings = {"ring_size": 2, "ulysses_size": 1}
CASES: list[Any] = [
    pytest.param(2, Plan(1, 3), RING2, id="ring 2, windows of 3"),
    pytest.param(4, Plan(2, 1), RING2, id="2 data ranks, ring 2"),
    pytest.param(4, Plan(2, 3), {"ulysses_size": 2, "ring_size": 1}, id="both, ulysses 2"),
    pytest.param(4, Plan(2, 3, clip=None), RING2, id="both, not clipped"),
    pytest.param(2, Plan(2, 3), {}, id="data ranks alone"),
    pytest.param(1, Plan(1, 3), {}, id="one rank"),
]


@pytest.mark.quick("ring 2, windows of 3")
@pytest.mark.parametrize(("world_size", "plan", "more"), CASES)
def test_trainer_equals_a_loop_by_hand(world_size: int, plan: Plan, more: Settings) -> None:
    for got in run_ranks(world_size, trained, plan, more):
        close(got, want(plan))


@pytest.mark.nightly
def test_it_differs_from_the_mean_of_micro_batches() -> None:
    plan = Plan(2, 3, clip=None)
    other = run_ranks(4, trained, plan, {**RING2, "token_weighting": "micro_batch"})[0]
    assert (other - want(plan)).abs().max() > 1e-3


# -- manual optimization, and Fabric ------------------------------------------------------------------


class ByHandInTheModule(Small):
    """Accumulates, clips and steps itself; divides by the batches of a window as Lightning does."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        first = batch_idx - batch_idx % self.plan.window
        size = min(self.plan.window, self.plan.batches - first)
        loss = self.loss(batch) / size
        self.manual_backward(0.25 * loss, retain_graph=True)
        self.manual_backward(0.75 * loss)
        if batch_idx - first == size - 1:
            if self.plan.clip is not None:
                self.clip_gradients(optimizer, self.plan.clip)
            optimizer.step()
            optimizer.zero_grad()


def stepped_by_module(
    rank: int, world_size: int, plan: Plan, more: Settings | None = None
) -> torch.Tensor:
    module = ByHandInTheModule(plan)
    data_rank = rank // (world_size // plan.data_ranks)
    settings = settings_of(plan.data_ranks, **(more or {}))
    trainer_of(world_size, settings).fit(module, plan.loader(data_rank))
    return weights(module)


def stepped_by_fabric(
    rank: int, world_size: int, plan: Plan, more: Settings | None = None
) -> torch.Tensor:
    settings = settings_of(plan.data_ranks, **(more or {}))
    strategy = FabricStrategy(labels="aligned", **settings)
    plugins: Any = [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    plain = Small()
    setup: Any = fabric.setup(plain.model, plain.configure_optimizers())
    model, optimizer = setup
    loader: Any = fabric.setup_dataloaders(
        plan.loader(strategy.data_rank), use_distributed_sampler=False
    )
    for index, batch in enumerate(loader):
        first = index - index % plan.window
        size = min(plan.window, plan.batches - first)
        last = index - first == size - 1
        local = strategy.shard_batch(batch)
        with fabric.no_backward_sync(model, enabled=not last):
            logits = model(local["input_ids"], local["position_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), local["labels"].flatten())
            fabric.backward(loss / size)
        if last:
            if plan.clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=plan.clip)
            optimizer.step()
            optimizer.zero_grad()
    strategy.end_step()
    return weights(plain)


@pytest.mark.nightly
@pytest.mark.parametrize("clip", [0.05, None])
@pytest.mark.parametrize("stepped", [stepped_by_module, stepped_by_fabric])
def test_loops_of_ones_own_equal_a_loop_by_hand(stepped: Any, clip: float | None) -> None:
    plan = Plan(2, 3, clip=clip)
    for got in run_ranks(4, stepped, plan):
        close(got, want(plan))


HSDP = {"data_parallel": "hsdp", "data_parallel_replicate_size": 2}
SHARDING = [
    pytest.param(stepped_by_fabric, {"data_parallel": "fsdp"}, id="fabric, fsdp"),
    pytest.param(
        stepped_by_fabric, {"data_parallel": "zero1"}, id="fabric, zero1", marks=pytest.mark.nightly
    ),
    pytest.param(stepped_by_fabric, HSDP, id="fabric, hsdp", marks=pytest.mark.nightly),
    pytest.param(
        stepped_by_module, {"data_parallel": "fsdp"}, id="trainer, fsdp", marks=pytest.mark.nightly
    ),
    pytest.param(
        stepped_by_module,
        {"data_parallel": "zero1"},
        id="trainer, zero1",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("stepped", "more"), SHARDING)
def test_sharded_loops_of_ones_own_equal_a_loop_by_hand(stepped: Any, more: Settings) -> None:
    """Also where micro-batches leave their gradients in other places than ``grad``."""
    plan = Plan(2, 3)
    for got in run_ranks(4, stepped, plan, more):
        close(got, want(plan))


# -- several optimizers, which step at different times ------------------------------------------------


class Alternating(Small):
    """Like a GAN: one optimizer steps at every batch, the other after every second, on its own loss."""

    def __init__(self, emptied: bool) -> None:
        super().__init__()
        self.emptied = emptied
        self.automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        often, seldom = optimizers
        often.zero_grad(set_to_none=self.emptied)
        self.manual_backward(self.loss(batch))
        often.step()
        if batch_idx % 2:
            seldom.zero_grad(set_to_none=self.emptied)
            self.manual_backward(2 * self.loss(batch))
            seldom.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        half = len(parameters) // 2
        return [torch.optim.SGD(p, lr=0.05) for p in (parameters[:half], parameters[half:])]


def alternating(rank: int, world_size: int, data_ranks: int | None, emptied: bool) -> torch.Tensor:
    plan = Plan(data_ranks or 2, 1)
    module: pl.LightningModule = Alternating(emptied)
    if data_ranks is None:
        joined = [
            {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            for parts in zip(plan.loader(0), plan.loader(1), strict=True)
        ]
        loader: Any = DataLoader(joined, batch_size=None)  # type: ignore[arg-type]
        trainer_of(1, None).fit(module, loader)
    else:
        data_rank = rank // (world_size // data_ranks)
        trainer_of(world_size, settings_of(data_ranks)).fit(module, plan.loader(data_rank))
    return weights(module)


@pytest.mark.nightly
@pytest.mark.parametrize("emptied", [True, False], ids=["to None", "to zero"])
def test_optimizers_with_windows_of_their_own(emptied: bool) -> None:
    (alone_,) = run_ranks(1, alternating, None, emptied)
    for got in run_ranks(4, alternating, 2, emptied):
        close(got, alone_)


class TakingTurns(Alternating):
    """Two optimizers whose windows of two batches overlap; the one that has no turn is frozen.

    Args:
        targets: of every batch, to weight them by hand; ``None`` leaves it to the strategy.
    """

    def __init__(self, targets: list[int] | None) -> None:
        super().__init__(True)
        self.targets = targets

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        turn, ends = batch_idx % 2, batch_idx % 4 >= 2
        for index, optimizer in enumerate(optimizers):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.requires_grad_(index == turn)
        share = 0.5
        if self.targets is not None:
            other = self.targets[batch_idx - 2 if ends else batch_idx + 2]
            share = self.targets[batch_idx] / (self.targets[batch_idx] + other)
        self.manual_backward(share * self.loss(batch))
        if ends:
            optimizers[turn].step()
            optimizers[turn].zero_grad()


def taking_turns(rank: int, world_size: int) -> torch.Tensor:
    rows = samples(8)
    for index, row in enumerate(rows):
        row["labels"] = row["input_ids"].masked_fill(torch.arange(LENGTH) < 3 * index, -100)
    targets = [LENGTH - 3 * index for index in range(8)]
    module: pl.LightningModule = TakingTurns(targets if world_size == 1 else None)
    settings = None if world_size == 1 else settings_of(1)
    trainer_of(world_size, settings).fit(module, DataLoader(rows, batch_size=1))  # type: ignore[arg-type]
    return weights(module)


@pytest.mark.nightly
def test_windows_that_overlap_while_layers_take_turns() -> None:
    (alone_,) = run_ranks(1, taking_turns)
    for got in run_ranks(2, taking_turns):
        close(got, alone_)


def test_the_unit_stays_while_any_window_is_open() -> None:
    """Two batches with gradients 1 and 3; the second has two passes, between which one optimizer steps."""
    optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2)]
    (of_a,), (of_b,) = (each.param_groups[0]["params"] for each in optimizers)
    a, b = optimizers
    windows = AccumulatedTokens()

    def backward(batch: object, targets: int, gradient: float) -> None:
        weight = windows.weight(batch, targets, optimizers, None)
        for p in (of_a, of_b):
            p.grad = torch.zeros(1) if p.grad is None else p.grad
            p.grad += weight * gradient

    first, second = object(), object()
    backward(first, 10, 1.0)
    windows.end(b, None)
    assert float(of_b.grad) == pytest.approx(1.0)
    b.zero_grad()
    backward(second, 40, 3.0)
    windows.end(a, None)
    assert float(of_a.grad) == pytest.approx(2 * (10 * 1.0 + 40 * 3.0) / 50)
    a.zero_grad()
    backward(second, 40, 3.0)
    windows.end(b, None)
    assert float(of_b.grad) == pytest.approx(3.0 + 3.0)


class Sharing(Alternating):
    """Both optimizers have all parameters."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.05) for _ in range(2)]


def sharing(rank: int, world_size: int) -> None:
    trainer_of(world_size, settings_of(1)).fit(Sharing(True), Plan(1, 1).loader(0))


def test_optimizers_that_share_parameters_are_refused() -> None:
    match = "two optimizers of this run share parameters"
    expect_on_every_rank(2, sharing, error=ConfigError, match=match)
