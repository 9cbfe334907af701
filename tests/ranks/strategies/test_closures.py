"""Optimizers that search along the loss of a closure: ranks are given one process's, and search alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    RING3,
    ULYSSES,
    Batch,
    Settings,
    Small,
    loader,
    samples,
    trainer_of,
    weights,
)
from tests.ranks.strategies.test_fabric import fabric_of

GRIDS = {"ring": (2, RING), "ulysses": (2, ULYSSES), "ring3": (3, RING3), "hybrid": (4, HYBRID)}
OF_DATA = {**RING, "data_parallel_size": 2, "token_weighting": "global"}


def search(parameters: Any) -> torch.optim.Optimizer:
    """How far it goes depends on every value that its closure returns."""
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


class Searches(ContextParallelMixin, Small):
    """``returned`` says of what kind a manual closure's value is."""

    context_parallel_labels = "aligned"

    def __init__(self, returned: str) -> None:
        super().__init__()
        self.automatic_optimization = returned == "automatic"  # type: ignore[assignment]
        self.returned = returned
        self.seen: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.loss(batch)
            if self.returned == "two counts":
                mask = batch["labels"] != -100
                self.count_targets(mask)
                self.manual_backward(loss, retain_graph=True)
                self.count_targets(mask & (batch["input_ids"] % 3 == 0))
                self.manual_backward(0.0 * loss)
                return 2 * loss
            self.manual_backward(loss)
            kinds = {"number": loss.item, "average": lambda: self.average(loss.detach())}
            return kinds.get(self.returned, lambda: loss)()

        self.seen.append(float(torch.as_tensor(optimizer.step(closure)).detach()))
        return None

    def configure_optimizers(self) -> Any:
        return search(self.parameters())


def by_trainer(
    rank: int, world_size: int, settings: Settings | None, returned: str
) -> tuple[torch.Tensor, list[float]]:
    module = Searches(returned)
    trainer_of(world_size, settings).fit(module, loader(4))
    return weights(module), module.seen


def by_rows(rank: int, world_size: int, settings: Settings | None, returned: str) -> torch.Tensor:
    """Batches of four rows, of which each of two data ranks reads two."""
    module = Searches(returned)
    own = slice(None) if settings is None else slice(rank // 2 * 2, rank // 2 * 2 + 2)
    rows = [row for first in (0, 4) for row in samples(8)[first : first + 4][own]]
    data = DataLoader(rows, batch_size=4 if settings is None else 2)  # type: ignore[arg-type]
    trainer_of(world_size, settings).fit(module, data)
    return weights(module)


def by_fabric(
    rank: int, world_size: int, settings: Settings | None, returned: str
) -> tuple[torch.Tensor, list[float]]:
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    module, seen = Searches(returned), []
    setup: Any = fabric.setup(module.model, search(module.model.parameters()))
    module.model, optimizer = setup
    strategy: Any = fabric.strategy
    for batch in loader(4):
        part = batch if settings is None else strategy.shard_batch(batch)

        def closure(part: Batch = part) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module.loss(part)
            fabric.backward(loss)
            return loss

        seen.append(float(optimizer.step(closure).detach()))
    return weights(module), seen


@pytest.mark.quick("ring3-fabric")
@pytest.mark.parametrize(
    ("run", "returned"),
    [
        pytest.param(by_fabric, "tensor", id="fabric"),
        *(pytest.param(by_trainer, x, id=x) for x in ("tensor", "number", "average")),
    ],
)
@pytest.mark.parametrize("grid", list(GRIDS))
def test_a_search_along_a_closure_is_one_process_s(grid: str, run: Any, returned: str) -> None:
    count, settings = GRIDS[grid]
    (want, losses), *_ = run_ranks(1, run, None, "tensor")
    assert not torch.equal(want, weights(Small())), "nothing was trained"
    for got, seen in run_ranks(count, run, settings, returned):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
        assert seen == pytest.approx(losses, rel=1e-9)


@pytest.mark.quick("tensor")
@pytest.mark.parametrize("returned", ["tensor", "automatic"])
def test_ranks_with_other_samples_search_alike(returned: str) -> None:
    want = run_ranks(1, by_rows, None, returned)[0]
    for got in run_ranks(4, by_rows, OF_DATA, returned):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


def test_a_search_along_a_value_that_is_none_of_the_losses_is_refused() -> None:
    match = "none of the losses which went backward.*count_targets"
    expect_on_every_rank(2, by_trainer, RING, "two counts", error=ConfigError, match=match)


def over_batches(
    rank: int, world_size: int, settings: Settings | None, average: bool
) -> tuple[torch.Tensor, list[float]]:
    """One search along the sum of two batches' losses."""
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    module, seen = Searches("tensor"), []
    setup: Any = fabric.setup(module.model, search(module.model.parameters()))
    module.model, optimizer = setup
    strategy: Any = fabric.strategy
    batches = list(loader(4))
    for batch, cut in zip(batches, (slice(3, 15), slice(0, 9)), strict=False):
        batch["labels"][:, cut] = -100

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss = module.loss(batch if settings is None else strategy.shard_batch(batch))
            fabric.backward(loss)
            total += strategy.average(loss.detach()) if average and settings else loss.detach()
        return total

    for _ in range(2):
        seen.append(float(optimizer.step(closure)))
    if settings:
        strategy.end_step()
    return weights(module), seen


@pytest.mark.nightly
@pytest.mark.parametrize("grid", list(GRIDS))
def test_a_search_along_averages_of_several_batches_is_one_process_s(grid: str) -> None:
    count, settings = GRIDS[grid]
    (want, losses), *_ = run_ranks(1, over_batches, None, True)
    for got, seen in run_ranks(count, over_batches, settings, True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
        assert seen == pytest.approx(losses, rel=1e-9)


def test_a_search_along_ranks_own_sums_of_several_batches_is_refused() -> None:
    match = r"closure of LBFGS goes over several batches.*average\(loss\)"
    expect_on_every_rank(2, over_batches, RING, False, error=ConfigError, match=match)
