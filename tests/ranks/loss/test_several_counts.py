"""Two losses in one step, each with its count and its backward, as a GAN has: gradients, and what is shown of
each loss, are one process's; a value of which it is not known what it is a mean over is refused."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    RING3,
    ULYSSES,
    Batch,
    Settings,
    Small,
    alone,
    loader,
    trainer_of,
    weights,
)

GRIDS = {"ring": (2, RING), "ulysses": (2, ULYSSES), "ring3": (3, RING3), "hybrid": (4, HYBRID)}
Shown = dict[str, list[float]]


def two_losses(logits: torch.Tensor, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each the losses of tokens, and its mask."""
    labels = batch["labels"]
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    mask = labels != -100
    return [(losses, mask), (losses.square(), mask & (batch["input_ids"] % 3 == 0))]


class Twice(ContextParallelMixin, Small):
    """``when`` says what is averaged, and where."""

    context_parallel_labels = "aligned"

    def __init__(self, when: str) -> None:
        super().__init__()
        self.automatic_optimization = False  # type: ignore[assignment]
        self.when = when
        self.shown: Shown = {"a": [], "c": [], "logged": []}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        logits, found = self.logits(batch), []
        if self.when == "labels first":
            plain = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            self.manual_backward(plain, retain_graph=True)
            found.append(plain.detach())
        for at, (losses, mask) in enumerate(two_losses(logits, batch)):
            if self.when == "labels first" and not at:
                continue
            loss = (losses * mask).sum() / self.count_targets(mask)
            if self.when == "before":
                self.keep("ac"[at], loss)
            self.manual_backward(loss, retain_graph=not at)
            found.append(loss.detach())
            if self.when == "each":
                self.keep("ac"[at], loss)
            self.log(f"logged_{at}", loss.detach(), batch_size=1)
        if self.when in ("end", "labels first"):
            for name, loss in zip("ac", found, strict=True):
                self.keep(name, loss)
        if self.when == "sum":
            self.average(found[0] + found[1])
        if self.when == "logged sum":
            self.log("sum", found[0] + found[1], batch_size=1)
        optimizer.step()

    def keep(self, name: str, loss: torch.Tensor) -> None:
        self.shown[name].append(float(self.average(loss.detach())))

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        names = ("logged_0", "logged_1")
        metrics = self.trainer.callback_metrics
        self.shown["logged"] += [float(metrics[name]) for name in names if name in metrics]


def trained(
    rank: int, world_size: int, settings: Settings | None, when: str
) -> tuple[torch.Tensor, Shown, list[str]]:
    module = Twice(when)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(world_size, settings).fit(module, loader(4))
    said = [str(x.message) for x in caught if "count_targets" in str(x.message)]
    return weights(module), module.shown, said


def by_fabric(
    rank: int, world_size: int, settings: Settings | None, when: str
) -> tuple[torch.Tensor, Shown, list[str]]:
    from lightning.fabric import Fabric

    module, options = Twice(when), settings
    if options is None:
        alone()
    strategy: Any = (
        "auto"
        if options is None
        else UlyssesRingStrategy(labels="aligned", shard_dataloaders=True, **options)
    )
    plugins: Any = [] if options is None else [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    model, optimizer = fabric.setup(module.model, torch.optim.SGD(module.parameters(), lr=0.05))
    ours: Any = None if options is None else fabric.strategy
    shown: Shown = {"a": [], "c": [], "logged": []}
    batches: Any = fabric.setup_dataloaders(loader(4))
    for batch in batches:
        optimizer.zero_grad()
        positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[1])[None])
        logits, found = model(batch["input_ids"], positions), []
        of_all = ours.average if ours else torch.Tensor.clone
        for at, (losses, mask) in enumerate(two_losses(logits, batch)):
            count = ours.count_targets(mask) if ours else mask.sum()
            found.append((losses * mask).sum() / count)
            if when == "before":
                shown["ac"[at]].append(float(of_all(found[-1].detach())))
            fabric.backward(found[-1], retain_graph=not at)
        if when == "sum":
            of_all((found[0] + found[1]).detach())
        for name, loss in zip("ac" if when != "before" else "", found, strict=when != "before"):
            shown[name].append(float(of_all(loss.detach())))
        optimizer.step()
    return weights(module), shown, []


@pytest.mark.quick("trained-end-ring3")
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("when", ["each", "end", "labels first", "before"])
@pytest.mark.parametrize("run", [trained, by_fabric], ids=["trained", "by_fabric"])
def test_each_loss_is_one_process_s(run: Any, when: str, grid: str) -> None:
    ranks, settings = GRIDS[grid]
    ((want, shown, _),) = run_ranks(1, run, None, when)
    for got, own, said in run_ranks(ranks, run, settings, when):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        assert not said
        for name, values in shown.items():
            assert own[name] == pytest.approx(values, rel=1e-10), name


@pytest.mark.quick("trained-ring")
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("run", [trained, by_fabric], ids=["trained", "by_fabric"])
def test_a_sum_of_losses_is_refused(run: Any, grid: str) -> None:
    ranks, settings = GRIDS[grid]
    match = "average was given a value that is none of the losses .* add up the averages"
    expect_on_every_rank(ranks, run, settings, "sum", error=ConfigError, match=match)


@pytest.mark.nightly
def test_a_logged_sum_is_said_once() -> None:
    (_, _, said), (_, _, others) = run_ranks(2, trained, RING, "logged sum")
    assert len(said) == 1
    assert re.search(r"self.log\('sum', ...\) in training_step .*none of the losses", said[0])
    assert not others
