"""Samplers: those that count processes are refused, all others give the order of one process or of DDP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from lightning_cp.errors import ConfigError, LightningCPError
from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import (
    RING,
    Batch,
    Settings,
    Small,
    alone,
    close,
    trainer_of,
    weights,
)
from tests.helpers.strategies.streams import rows_of
from tests.ranks.strategies.test_fabric import Loop, fabric_of

FOUR: Settings = {**RING, "data_parallel_size": 2}
Order = list[list[int]]


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


class InPairs(BatchSampler):
    """A batch sampler of the user's own: every batch again as the one after."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch
            yield batch

    def __len__(self) -> int:
        return 2 * super().__len__()


class Shards:
    """Not derived from anything: what other libraries do."""

    def __init__(self, num_processes: int, process_index: int) -> None:
        self.num_processes, self.process_index = num_processes, process_index
        self.sampler = SequentialSampler(range(8))

    def __iter__(self) -> Iterator[list[int]]:
        yield from [[at] for at in range(self.process_index, 8, self.num_processes)]

    def __len__(self) -> int:
        return 8 // self.num_processes


def rows() -> Any:
    """Eight samples that know their number."""
    return [{**row, "index": torch.tensor(at)} for at, row in enumerate(rows_of(8))]


def loader_of(kind: str, size: int, rank: int) -> DataLoader[Any]:
    data = rows()
    made: dict[str, dict[str, Any]] = {
        "in order": {"batch_size": 2},
        "shuffled": {"batch_size": 2, "shuffle": True},
        "own sampler": {"batch_size": 2, "sampler": Backwards(8)},
        "own batches": {"batch_sampler": InPairs(SequentialSampler(data), 2, False)},
        "distributed": {
            "batch_size": 2,
            "sampler": DistributedSampler(data, num_replicas=size, rank=rank, seed=3),
        },
        "inside": {
            "batch_sampler": BatchSampler(
                DistributedSampler(data, num_replicas=size, rank=rank), 2, False
            )
        },
        "other names": {"batch_sampler": Shards(size, rank)},
    }
    return DataLoader(data, **made[kind])


# -- the order ----------------------------------------------------------------------------------------


class Seeing(Small):
    """Remembers which samples came, and takes its loader from a hook, as Lightning recommends."""

    def __init__(self, kind: str, size: int, rank: int) -> None:
        super().__init__()
        self.order: Order = []
        self.loads = 0
        self.wanted = (kind, size, rank)

    def setup(self, stage: str) -> None:
        torch.manual_seed(5)  # Lightning does it where it starts processes, and only there

    def train_dataloader(self) -> Any:
        self.loads += 1
        return loader_of(*self.wanted)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.order.append(batch["index"].tolist())
        return super().training_step(batch, batch_idx)


def seen(rank: int, world_size: int, settings: Settings | None, kind: str, inject: bool) -> Any:
    """The samples of two epochs with a loader made anew for each; plain DDP if there are no settings."""
    options: dict[str, Any] = {
        "use_distributed_sampler": inject,
        "max_epochs": 2,
        "reload_dataloaders_every_n_epochs": 1,
    }
    size = (settings or {}).get("data_parallel_size", 1)
    if settings is None and world_size > 1:
        size, settings = world_size, {}
        options |= {"strategy": DDPStrategy(), "plugins": [PoolEnvironment()]}
    module = Seeing(kind, size, rank * size // world_size)
    trainer_of(world_size, settings, **options).fit(module)
    assert module.loads == 2
    return module.order, weights(module)


KINDS = ["in order", "shuffled", "own sampler", "own batches", "distributed", "other names"]


@pytest.mark.nightly
@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_at_a_time_is_the_order_of_one_process(kind: str, inject: bool) -> None:
    (want,) = run_ranks(1, seen, None, kind, inject)
    for got in run_ranks(2, seen, RING, kind, inject):
        assert got[0] == want[0]
        close(got[1], want[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "inject"),
    [(kind, True) for kind in KINDS[:-1]] + [("distributed", False), ("other names", False)],
)
def test_several_samples_at_a_time_are_the_order_of_plain_ddp(kind: str, inject: bool) -> None:
    want = run_ranks(2, seen, None, kind, inject)
    assert want[0][0] != want[1][0]
    for rank, got in enumerate(run_ranks(4, seen, FOUR, kind, inject)):
        assert got[0] == want[rank // 2][0]
        close(got[1], want[rank // 2][1])


def in_fabric(rank: int, world_size: int, settings: Settings | None) -> Any:
    """The samples of two epochs of a shuffling loader, with ranks that are seeded differently."""
    if settings is None:
        alone()
    loop = Loop(world_size, settings)
    torch.manual_seed(rank)
    loader: Any = loop.fabric.setup_dataloaders(DataLoader(rows(), 2, shuffle=True))
    assert len(loader.dataset) == 8
    return [batch["index"].tolist() for _ in range(2) for batch in loader]


def test_fabric_leaves_the_order_of_one_process_as_well() -> None:
    (want,) = run_ranks(1, in_fabric, None)
    assert want[:4] != want[4:]
    assert run_ranks(2, in_fabric, RING) == [want, want]


# -- what counts processes ----------------------------------------------------------------------------


def counts(rank: int, world_size: int, kind: str, front: str, settings: Settings) -> None:
    by_rank = {"world": (world_size, rank), "other rank": (2, rank % 2)}
    loader = loader_of(kind, *by_rank["other rank" if kind == "other names" else "world"])
    if front == "trainer":
        inject = kind == "distributed"  # Lightning replaces the others, or cannot
        trainer_of(world_size, settings, use_distributed_sampler=inject).fit(Small(), loader)
    fabric = fabric_of(world_size, {**settings, "num_heads": 4})
    fabric.launch()
    fabric.setup_dataloaders(loader, use_distributed_sampler=kind == "distributed")
    raise AssertionError("nothing was refused")


@pytest.mark.quick("inside-False-fabric", "other names-True-fabric", "distributed-True-trainer")
@pytest.mark.parametrize("front", ["trainer", "fabric"])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("kind", ["distributed", "inside", "other names"])
def test_samplers_that_count_processes(kind: str, broadcast: bool, front: str) -> None:
    settings = {**FOUR, **({"batch_sync": "broadcast"} if broadcast else {})}
    with pytest.raises(RankError) as caught:
        run_ranks(4, counts, kind, front, settings)
    text = str(caught.value)
    got = {
        "distributed": "DistributedSampler shards samples with num_replicas=4, rank=",
        "inside": "DistributedSampler shards samples with num_replicas=4, rank=",
        "other names": "Shards shards samples with num_processes=2, process_index=",
    }[kind]
    assert text.count(f"{ConfigError.__name__}: ") + text.count("RankFailure: ") >= 4
    assert got in text
    assert "it must be num_replicas=2, rank=" in text or "num_processes=2, process_index=" in text
    assert "still running" not in text
    assert "strategy.data_rank" in text


@dataclass
class Split:
    """4 processes, and this is the second."""

    world_size: int = 4
    rank: int = 1
    global_rank: int = 1


class Stream(IterableDataset[Any]):
    """As a library's stream that was split over processes; the library keeps how in ``place``."""

    def __init__(self, place: str) -> None:
        setattr(self, place, Split())

    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


def split(rank: int, world_size: int, place: str, broadcast: bool) -> None:
    settings = {**RING, "batch_sync": "broadcast"} if broadcast else RING
    trainer_of(world_size, settings).fit(Small(), DataLoader(Stream(place), 2))


@pytest.mark.quick("_distributed-rank-False", "distributed_env-global_rank-True")
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(
    ("place", "name"), [("_distributed", "rank"), ("distributed_env", "global_rank")]
)
def test_a_stream_that_says_it_was_split_over_processes(
    place: str, name: str, broadcast: bool
) -> None:
    """``split_dataset_by_node`` of Hugging Face's datasets, and LitData."""
    match = f"Split shards samples with world_size=4, {name}=1, but .* world_size=1, {name}=0"
    error = LightningCPError if broadcast else ConfigError
    expect_on_every_rank(2, split, place, broadcast, error=error, match=match)
