"""Checks of values on the device refuse a step before the optimizer's, so that no forward waits for them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp.errors import BatchMismatchError, ConfigError, ShapeError
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.pool import expect_on_every_rank
from tests.helpers.pretended.device import PretendedDevice
from tests.helpers.pretended.runs import Cell, Module, PretendedAccelerator, execute, padded_batch
from tests.helpers.strategies import runs
from tests.helpers.strategies.small import trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:GPU available but not used")


MATCH = {
    "labels": "rank 1: labels= are not the batch's, or were changed",
    "targets": "rank 1: labels= are not the batch's, or were changed",
    "attention_mask": "rank 1: the attention_mask that the model was given is not the batch's",
    "position_ids": "rank 1: the position_ids that the model was given are not the batch's",
}


class Changing(Module):
    """Changes what it gives to the model on the second rank: labels, shifted ones, the mask or positions."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__(Cell("ddp", model="hf"))
        self.what, self.rank = what, rank

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.before = self.model.lm_head.weight.detach().clone()  # type: ignore[union-attr]
        if self.rank and self.what == "labels":
            batch["labels"].copy_(batch["labels"].roll(1, 1))
        if self.rank and self.what == "targets":
            batch["shift_labels"][:, ::3] = -100
            return self.model(**batch).loss
        if self.what in ("attention_mask", "position_ids"):
            given = {name: batch[name] for name in ("input_ids", "labels", self.what)}
            if self.rank:
                given[self.what] = given[self.what].flip(1)
            return self.model(**given).loss
        return self.loss(batch)


def train(rank: int, world_size: int, what: str) -> None:
    data = runs.make_data(runs.Run(steps=1, rows=2, seq_len=29, model="hf"))
    if what == "attention_mask":
        batch: Any = next(iter(runs.loader(data, 2)))
        padded: Any = padded_batch(batch)
        data = [{name: x[row] for name, x in padded.items()} for row in range(2)]
    with PretendedDevice(rank).use():
        module = Changing(what, rank)
        settings = {
            "mode": "ring",
            "labels": "auto",
            "parity_check": "off",
            "process_group_backend": "gloo",
            "kernel": "reference",
        }
        trainer = trainer_of(world_size, settings, accelerator=PretendedAccelerator())
        try:
            trainer.fit(module, DataLoader(data, batch_size=2))  # type: ignore[arg-type]
        finally:
            after = module.model.lm_head.weight.detach().cpu()  # type: ignore[union-attr]
            assert torch.equal(module.before.cpu(), after), "the optimizer has stepped"


@pytest.mark.parametrize("what", MATCH)
def test_a_step_is_refused_on_all_ranks_before_the_optimizer_steps(what: str) -> None:
    expect_on_every_rank(2, train, what, error=ConfigError, match=MATCH[what])


def train_on_other_batches(rank: int, world_size: int, name: str) -> None:
    make_data = runs.make_data

    def changed(run: runs.Run) -> Any:
        data: Any = make_data(run)
        for row in data:
            if rank:
                row[name] = row[name].roll(1, 0)
        return data

    with mock.patch.object(runs, "make_data", changed):
        execute(rank, world_size, Cell("ddp", driver="fabric", model="hf"))


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_ranks_compare_batches_that_are_on_the_device(name: str) -> None:
    """Labels are read on the host; of the tokens a checksum is."""
    match = rf"{name} \(values\)"
    expect_on_every_rank(2, train_on_other_batches, name, error=BatchMismatchError, match=match)


def shard_twice(rank: int, world_size: int) -> None:
    shard = FabricStrategy.shard_batch
    twice = mock.patch.object(
        FabricStrategy, "shard_batch", lambda own, batch: shard(own, shard(own, batch))
    )
    with twice:
        execute(rank, world_size, Cell("ddp", driver="fabric", model="hf"))


def test_a_shard_on_the_device_is_not_sharded_again() -> None:
    expect_on_every_rank(2, shard_twice, error=ShapeError, match="was sharded already")
