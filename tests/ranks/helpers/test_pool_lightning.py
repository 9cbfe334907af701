"""Real Trainers inside the pool, on the group that stands."""

from __future__ import annotations

import ctypes
import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment

SAMPLES, STEPS = 24, 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    # Lightning 2.6 still makes torch's old pytree leaves.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


class Line(pl.LightningModule):
    """Least squares on one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.seen: list[int] = []

    @override
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (index,) = batch
        self.seen += index.tolist()
        x = torch.stack([index.float() / SAMPLES, index.float() % 5, index.float() % 7], dim=1)
        return (self.layer(x) - x.sum(1, keepdim=True)).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    @override
    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        size = SAMPLES // STEPS // (dist.get_world_size() if dist.is_initialized() else 1)
        return DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=size)


def fit(rank: int, world_size: int, trainers: int) -> list[tuple[torch.Tensor, list[int]]]:
    """Weights and samples seen of several Trainers, one after the other in the same process."""
    group, results = dist.group.WORLD, []
    for _ in range(trainers):
        module = Line()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=DDPStrategy(process_group_backend="gloo"),
            plugins=[PoolEnvironment()],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        assert (trainer.world_size, trainer.global_rank) == (world_size, rank)
        trainer.fit(module)
        assert trainer.global_step == STEPS
        results.append((module.layer.weight.detach().clone(), module.seen))
    assert dist.group.WORLD is group, "a Trainer must use the group that stands"
    return results


@pytest.mark.nightly
def test_trainers_of_all_sizes_agree_and_do_not_interfere() -> None:
    (alone,) = run_ranks(1, fit, 1)
    weight, seen = alone[0]
    assert not torch.equal(weight, Line().layer.weight), "nothing was trained"
    assert sorted(seen) == list(range(SAMPLES))
    for world_size, trainers in ((2, 2), (4, 1), (1, 1), (2, 1)):
        ranks = run_ranks(world_size, fit, trainers)
        for number in range(trainers):
            shards = [rank[number][1] for rank in ranks]
            assert sorted(index for shard in shards for index in shard) == list(range(SAMPLES))
            assert all(len(shard) == SAMPLES // world_size for shard in shards)
            for rank in ranks:
                torch.testing.assert_close(rank[number][0], weight, rtol=1e-5, atol=1e-6)


def train_and_sleep(rank: int, world_size: int) -> None:
    fit(rank, world_size, 1)
    time.sleep(600)


@pytest.mark.nightly
def test_a_hang_after_a_trainer_still_says_where() -> None:
    """A Trainer that ends resets the handlers of all signals, the one that asks for stacks included."""
    with pytest.raises(RankError, match="in train_and_sleep"):
        run_ranks(1, train_and_sleep, timeout=5.0)


def train_and_crash(rank: int, world_size: int) -> None:
    fit(rank, world_size, 1)
    ctypes.string_at(0)


@pytest.mark.nightly
def test_a_crash_after_a_trainer_still_says_where() -> None:
    with pytest.raises(RankError, match=r"exit code -11(?s:.*)in train_and_crash"):
        run_ranks(1, train_and_crash)


def mismatch(rank: int, world_size: int) -> None:
    pl.Trainer(accelerator="cpu", devices=3, plugins=[PoolEnvironment()], strategy="ddp")


def test_a_trainer_of_another_size_is_refused() -> None:
    expect_on_every_rank(2, mismatch, error=RuntimeError, match="wants 3 ranks, the case has 2")
