"""Steps that leave batches out, or do not call the model: they do what they do in one process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.runs import HFModule, Run, make_data
from tests.helpers.strategies.runs import loader as loader_of
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    RING3,
    ULYSSES,
    Batch,
    Settings,
    loader,
    trainer_of,
    weights,
)
from tests.helpers.strategies.small import Small as SmallModule
from tests.ranks.strategies.test_fabric import Loop

pytestmark = pytest.mark.filterwarnings(
    "ignore:predict returned None if it was on purpose:UserWarning"
)
GRIDS = {"ring": (2, RING), "ulysses": (2, ULYSSES), "ring3": (3, RING3), "hybrid": (4, HYBRID)}


class Skips(SmallModule):
    """Leaves out every second batch, by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # type: ignore[assignment]
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) * self.temperature)
            optimizer.step()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx % 2:
            self.log("val", self.loss(batch), batch_size=1)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("rows", float(batch["input_ids"].shape[0]), batch_size=1)

    def predict_step(self, batch: Batch, batch_idx: int) -> None:
        return None


class SkipsShifted(HFModule):
    """Likewise, of a model that shifts labels by itself."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx % 2:
            super().validation_step(batch, batch_idx)


def all_stages(rank: int, world_size: int, settings: Settings | None) -> list[float]:
    trainer, module = trainer_of(world_size, settings, max_epochs=1), Skips()
    trainer.fit(module, loader(4), loader(6))
    found = [float(trainer.callback_metrics["val"])]
    found += [
        x for logged in trainer.test(module, loader(4), verbose=False) for x in logged.values()
    ]
    assert trainer.predict(module, loader(4)) in ([None] * 2, [])
    return [*found, float(weights(module).abs().sum())]


def of_hugging_face(rank: int, world_size: int, settings: Settings | None) -> float:
    run = Run(model="hf", rows=1)
    torch.manual_seed(2)
    module = SkipsShifted(run)
    options = None if settings is None else {**settings, "labels": "auto"}
    trainer = trainer_of(world_size, options)
    trainer.validate(module, loader_of(make_data(run)[:4], 1), verbose=False)
    return float(trainer.callback_metrics["val_loss"])


def evaluated(rank: int, world_size: int, settings: Settings | None) -> list[float]:
    """A loop of Fabric that leaves batches out after they were sharded."""
    loop = Loop(world_size, settings)
    found: list[float] = []
    for at, batch in enumerate(loader(4)):
        local = loop.shard(batch)
        if at % 2:
            loop.end()
            continue
        with torch.no_grad():
            found.append(float(loop.shown(loop.loss(local))))
    return found


@lru_cache
def in_one_process(case: Any) -> Any:
    return run_ranks(1, case, None)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("case", [all_stages, of_hugging_face, evaluated])
def test_batches_that_are_left_out(case: Any, grid: str) -> None:
    ranks, settings = GRIDS[grid]
    want = in_one_process(case)
    for got in run_ranks(ranks, case, settings):
        assert got == pytest.approx(want, rel=1e-6 if case is of_hugging_face else 1e-10)


class OwnSoftmax(nn.Module):
    """Attention by a name that does not say so, without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class StaysLocal(Skips):
    """Calls parts of the model, and not its attention; or attends by itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.other = how, OwnSoftmax()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        ids = batch["input_ids"]
        if self.how == "embedding":
            self.log("val", self.model.embed(ids).mean())
        else:
            self.log("val", self.other(nn.functional.one_hot(ids).double()).mean())

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        self.validation_step(batch, batch_idx)


def refused(rank: int, world_size: int, how: str, stage: str) -> None:
    getattr(trainer_of(world_size, RING), stage)(StaysLocal(how), loader(2))


@pytest.mark.quick("validate-embedding", "validate-softmax")
@pytest.mark.parametrize("how", ["embedding", "softmax"])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_model_whose_attention_stays_local_is_refused(how: str, stage: str) -> None:
    match = r"no attention call was intercepted in this step \(0 calls\)"
    expect_on_every_rank(2, refused, how, stage, error=ConfigError, match=match)
