"""Engines that spread parameters over data ranks: ranks that go apart are told before parameters move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_cp.errors import BatchMismatchError
from tests.helpers.pool import expect_on_every_rank
from tests.helpers.strategies.small import RING, Small, Staged, samples, trainer_of
from tests.helpers.strategies.streams import Batches, rows_of
from tests.ranks.strategies.test_fabric import fabric_of, model_of

SETTINGS = {**RING, "data_parallel_size": 2}
MOVES = (
    *("all_gather_into_tensor", "reduce_scatter_tensor"),  # until torch 2.12
    *("all_gather_single", "reduce_scatter_single"),
)
"""What moves parameters and gradients that are spread."""


@contextmanager
def counted() -> Iterator[list[str]]:
    """Names of the collectives that move parameters and gradients, as they are called."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in filter(partial(hasattr, dist), MOVES):
            own = getattr(dist, name)

            def call(*args: Any, _own: Any = own, _name: str = name, **kwargs: Any) -> Any:
                calls.append(_name)
                return _own(*args, **kwargs)

            patch.setattr(dist, name, call)
        yield calls


class Counting(Small):
    """Notes how much had moved when a batch was about to be shared out."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls, self.before = calls, [0]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.before.append(len(self.calls))
        return batch


class CountingStaged(Counting, Staged):
    """Validates as well."""


def rows_with_odd(rank: int) -> list[dict[str, Any]]:
    """The second batch of rank 1 is another one than that of rank 0, which has the same sample."""
    rows = samples(8)[rank // 2 :: 2]
    if rank == 1:
        rows[1]["input_ids"] = rows[1]["input_ids"].flip(0)
    return rows


def run(rank: int, world_size: int, engine: str, stage: str, rows: Any) -> None:
    with counted() as calls:
        module = (Counting if stage == "fit" else CountingStaged)(calls)
        trainer = trainer_of(world_size, {**SETTINGS, "data_parallel": engine})
        try:
            getattr(trainer, stage)(module, rows)
        finally:
            assert len(module.before) == 3  # the second batch
            assert 0 < module.before[-1] == len(calls)  # the first one did move something


def other_batches(rank: int, world_size: int, engine: str, stage: str) -> None:
    run(rank, world_size, engine, stage, DataLoader(rows_with_odd(rank)))  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_other_batches_in_one_group_are_an_error_on_all_ranks(engine: str, stage: str) -> None:
    match = r"disagree on input_ids \(values\) \(rank 0: .*rank 1: "
    expect_on_every_rank(4, other_batches, engine, stage, error=BatchMismatchError, match=match)


def ends_early(rank: int, world_size: int, engine: str) -> None:
    """Three batches on the last data rank, and four on the first."""
    rows = rows_of(16)[rank // 2 :: 2][: 6 if rank // 2 else 8]
    trainer = trainer_of(world_size, {**SETTINGS, "data_parallel": engine})
    trainer.predict(Staged(), Batches(rows))  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_a_data_rank_that_ends_early_in_prediction(engine: str) -> None:
    match = "the loader of ranks 2, 3 ended after 3 batches, but that of ranks 0, 1 has batch 4"
    expect_on_every_rank(4, ends_early, engine, error=BatchMismatchError, match=match)


def loop(rank: int, world_size: int, engine: str) -> None:
    """A loop of the user's, with one step that goes well."""
    fabric = fabric_of(world_size, {**SETTINGS, "data_parallel": engine})
    fabric.launch()
    plain = model_of()
    setup: Any = fabric.setup(plain, SGD(plain.parameters(), lr=0.1))
    model, optimizer = setup
    strategy: Any = fabric.strategy
    with counted() as calls:
        before: list[int] = []
        loader: Any = fabric.setup_dataloaders(
            DataLoader(rows_with_odd(rank)),  # type: ignore[arg-type]
            use_distributed_sampler=False,
        )
        try:
            for batch in loader:
                before.append(len(calls))
                local = strategy.shard_batch(batch)
                logits = model(local["input_ids"], local["position_ids"])
                mask = local["labels"] != -100
                count = strategy.count_targets(mask)
                fabric.backward((logits.square().mean(-1) * mask).sum() / count)
                optimizer.step()
        finally:
            assert 0 < before[-1] == len(calls)


def test_a_loop_is_told_before_parameters_move() -> None:
    match = r"disagree on input_ids \(values\)"
    expect_on_every_rank(4, loop, "fsdp", error=BatchMismatchError, match=match)
