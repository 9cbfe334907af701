"""Places, windows and seeds by themselves, in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cp.checkpoint.restore import templates_for
from lightning_cp.errors import CheckpointError
from lightning_cp.loaders.position import LoaderPosition, check_same_order, open_at
from lightning_cp.resume.record import ResumePoint, _reseed


def loader_of(rows: int, seed: int = 3) -> DataLoader[Any]:
    data: Any = torch.arange(12)
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0, seed=seed)
    return DataLoader(data, rows, sampler=sampler)


def read(loader: DataLoader[Any], count: int) -> tuple[dict[str, Any], Iterator[Any]]:
    """The place after some batches, and what is left of the pass."""
    place = LoaderPosition()
    place.start_pass(loader)
    batches = iter(loader)
    for _ in range(count):
        place.request_batch(trains=True)
        place.before_read(loader)
        next(batches)
        place.after_read()
    return {**place.saved(loader), "ranks": (2, 2)}, batches


def test_the_same_loader_goes_on() -> None:
    saved, left = read(loader_of(2), 2)
    assert [x.tolist() for x in open_at(loader_of(2), saved)] == [x.tolist() for x in left]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: loader_of(1), "a batch_size of 2, and now it is 1"),
        (lambda: loader_of(2, seed=4), r"the sampler .*seed=3, and now it is .*seed=4"),
    ],
    ids=["batch_size", "order"],
)
def test_another_batch_size_or_order_on_the_same_mesh_is_refused(other: Any, says: str) -> None:
    saved, _ = read(loader_of(2), 2)
    with pytest.raises(CheckpointError, match=says):
        open_at(other(), saved)
    check_same_order(other(), {**saved, "batches": 0})  # nothing was used


class Stateful(DataLoader[Any]):
    """As torchdata's: its state is a number of batches."""

    def state_dict(self) -> dict[str, Any]:
        return {"batches": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", [DataLoader, Stateful])
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"batch_size": 3, "shuffle": True}, "a batch_size of 2, and now it is 3"),
        ({"batch_size": 2}, "an order that is random, and now it is sequential"),
    ],
    ids=["batch_size", "shuffle"],
)
def test_another_plain_loader_is_refused(kind: Any, other: dict[str, Any], says: str) -> None:
    data = torch.arange(12)
    saved, _ = read(kind(data, 2, shuffle=True), 2)
    with pytest.raises(CheckpointError, match=says):
        open_at(kind(data, **other), saved)
    check_same_order(kind(data, 2, shuffle=True, num_workers=1), saved)


def drawn_by(data_rank: int) -> tuple[float, float, float]:
    """What a new data rank draws, from each generator."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    point = ResumePoint.now(torch.device("cpu"), [])
    torch.rand(data_rank % 3)  # what was drawn meanwhile does not matter
    _reseed(point, data_rank)
    point.restore_random(torch.device("cpu"))
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_new_data_ranks_draw_numbers_of_their_own() -> None:
    ranks = (2, 3, 258)  # of which the last byte of the last one is the first one
    drawn = [drawn_by(rank) for rank in ranks]
    assert [drawn_by(rank) for rank in ranks] == drawn
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(ranks)


def test_state_is_spread_by_the_names_that_were_saved() -> None:
    modules = {"a": nn.Linear(2, 3), "b": nn.Linear(4, 5)}
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()])
    names = ["b.weight", "b.bias", "a.weight", "a.bias"]
    template = templates_for(modules, {("optimizer",): (optimizer, names)})
    assert template(("optimizer", "state", 0, "momentum_buffer")) is modules["b"].weight
    assert template(("optimizer", "state", 3, "momentum_buffer")) is modules["a"].bias
    assert template(("a", "weight")) is not None
