"""Kinds of attention in models that engines shard: windows, caps, sinks, ALiBi, values of another width."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.helpers.models.steps import VOCAB, Case, make_model
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import HYBRID, RING, Settings, trainer_of, whole

WINDOW = 7
FAMILIES = ("mistral", "gemma2_capped", "gpt_oss", "bloom", "deepseek_v3")
REPLICAS: Settings = {"data_parallel_size": 2, "data_parallel_replicate_size": 2}
ENGINES: dict[str, tuple[int, Settings]] = {
    "ddp": (2, RING),
    "zero1": (2, {**RING, "data_parallel": "zero1"}),
    "fsdp": (2, {**RING, "data_parallel": "fsdp"}),
    "hsdp": (4, {**RING, "data_parallel": "hsdp", **REPLICAS}),
    "hybrid": (4, {**HYBRID, "data_parallel": "fsdp"}),
}
Weights = dict[str, torch.Tensor]


class Family(pl.LightningModule):
    """A model of the zoo; the module computes the loss, in float64."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.model = make_model(Case(model=family, window=WINDOW, use_cache=False))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        known = inspect.signature(self.model.forward).parameters
        names = {"input_ids", "position_ids"} & batch.keys() & known.keys()
        logits = self.model(**{name: batch[name] for name in names}).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trained(rank: int, world_size: int, family: str, settings: Settings | None) -> Weights:
    """Weights after three steps of four rows."""
    module = Family(family)
    ids = torch.randint(VOCAB, (12, 29), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row.roll(-1)} for row in ids]
    data = (settings or {}).get("data_parallel_size", 1)
    own = rows[rank * data // world_size :: data]
    trainer_of(world_size, settings).fit(module, DataLoader(own, batch_size=4 // data))  # type: ignore[arg-type]
    return {name: whole(p.detach()).clone() for name, p in module.named_parameters()}


@lru_cache
def one_process(family: str) -> Weights:
    return run_ranks(1, trained, family, None)[0]


@pytest.mark.quick("fsdp-gpt_oss")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_are_those_of_one_process(engine: str, family: str) -> None:
    """The softmax of some families is float32 in one process."""
    want = one_process(family)
    ranks, settings = ENGINES[engine]
    for got in run_ranks(ranks, trained, family, settings, timeout=120.0):
        for name, weight in want.items():
            torch.testing.assert_close(
                got[name], weight, rtol=0, atol=2e-6 * float(weight.abs().max())
            )
