"""Loaders that end early, fail or differ on some ranks are an error on all of them, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_cp.errors import BatchMismatchError, ConfigError, RankFailure
from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import RING, Settings, Small, trainer_of
from tests.helpers.strategies.streams import Batches, Stream, rows_of
from tests.ranks.strategies.test_fabric import Loop

BROADCAST: Settings = {**RING, "batch_sync": "broadcast"}
FOUR: Settings = {**RING, "data_parallel_size": 2}
FOUR_BROADCAST: Settings = {**BROADCAST, "data_parallel_size": 2}


# -- different numbers of batches ---------------------------------------------------------------------


def ends_early(rank: int, world_size: int, settings: Settings, kind: str, stage: str) -> int:
    """Three batches on the last rank (or the last data rank), and four on the others."""
    data_rank = rank * settings.get("data_parallel_size", world_size) // world_size
    rows = rows_of(16)[data_rank % 2 :: 2][: 6 if rank == world_size - 1 or data_rank else 8]
    if "data_parallel_size" not in settings:
        rows = rows_of(8)[: len(rows)]
    data: Any = Batches(rows) if kind == "iterable" else DataLoader(Stream(rows), 2)
    if kind in ("sized", "limited"):
        data = DataLoader(rows, 2)  # type: ignore[arg-type]
    limits: dict[str, Any] = {"limit_train_batches": 3} if kind == "limited" else {}
    trainer = trainer_of(world_size, settings, **limits)
    if stage == "fit":
        trainer.fit(Small(), data)
        return trainer.global_step
    outputs: Any = trainer.predict(Small(), data)
    return len(outputs)


@pytest.mark.quick("fit-stream", "predict-iterable")
@pytest.mark.parametrize("kind", ["stream", "iterable"])
@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_a_loader_that_ends_early_in_a_group(kind: str, stage: str) -> None:
    match = "the loader of rank 1 ended after 3 batches, but that of rank 0 has batch 4"
    expect_on_every_rank(2, ends_early, RING, kind, stage, error=BatchMismatchError, match=match)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "ended", "going"),
    [(FOUR, "ranks 2, 3", "ranks 0, 1"), (FOUR_BROADCAST, "rank 2", "rank 0")],
)
def test_a_data_rank_that_ends_early_in_training(
    settings: Settings, ended: str, going: str
) -> None:
    match = (
        f"the loader of {ended} ended after 3 batches, but that of {going} has batch 4.*limit_train"
    )
    expect_on_every_rank(
        4, ends_early, settings, "stream", "fit", error=BatchMismatchError, match=match
    )


@pytest.mark.quick("stream-settings1", "sized-settings0")
@pytest.mark.parametrize("settings", [FOUR, FOUR_BROADCAST])
@pytest.mark.parametrize("kind", ["stream", "sized"])
def test_data_ranks_may_have_different_numbers_elsewhere(settings: Settings, kind: str) -> None:
    assert run_ranks(4, ends_early, settings, kind, "predict") == [4, 4, 3, 3]


@pytest.mark.quick("predict")
@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_lengths_are_compared_before_the_first_batch(stage: str) -> None:
    match = r"loaders of different lengths, in batches \(rank 0: 4, rank 1: 3\)"
    expect_on_every_rank(2, ends_early, RING, "sized", stage, error=BatchMismatchError, match=match)


@pytest.mark.nightly
def test_lengths_of_data_ranks() -> None:
    match = r"different lengths, in batches \(rank 0: 4, rank 1: 4, rank 2: 3, rank 3: 3\)"
    expect_on_every_rank(4, ends_early, FOUR, "sized", "fit", error=BatchMismatchError, match=match)
    match = r"different lengths, in batches \(rank 0: 4, rank 2: 3\)"
    expect_on_every_rank(
        4, ends_early, FOUR_BROADCAST, "sized", "fit", error=BatchMismatchError, match=match
    )


@pytest.mark.nightly
def test_lengths_count_as_far_as_they_are_used() -> None:
    assert run_ranks(4, ends_early, FOUR, "limited", "fit") == [3] * 4


def sized_on_one(rank: int, world_size: int) -> None:
    rows: Any = rows_of(4)
    data = DataLoader(rows, 2) if rank else DataLoader(Stream(rows), 2)
    trainer_of(world_size, RING).fit(Small(), data)


def test_a_length_on_one_rank_only() -> None:
    match = r"\(rank 0: no length, rank 1: 2\)"
    expect_on_every_rank(2, sized_on_one, error=BatchMismatchError, match=match)


# -- what fails on one rank ---------------------------------------------------------------------------


class Broken(Dataset[Any]):
    """Cannot read its fifth sample."""

    def __init__(self, breaks: bool) -> None:
        self.rows, self.breaks = rows_of(8), breaks

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.breaks and index == 4:
            raise OSError("the disk is gone")
        return self.rows[index]


class BrokenStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from self.rows[:4]
        raise OSError("the disk is gone")


class NeverBegins(Stream):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("the disk is gone")


def fails(rank: int, world_size: int, settings: Settings, kind: str, stage: str) -> None:
    breaks = rank == (0 if "batch_sync" in settings else 1)
    made: dict[str, Any] = {
        "map": Broken(breaks),
        "stream": BrokenStream(rows_of(8)) if breaks else Stream(rows_of(8)),
        "begin": NeverBegins([]) if breaks else Stream(rows_of(8)),
    }
    trainer = trainer_of(world_size, settings)
    getattr(trainer, stage)(Small(), DataLoader(made[kind], 2))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ["fit", "predict"])
@pytest.mark.parametrize("settings", [RING, BROADCAST], ids=["check", "broadcast"])
@pytest.mark.parametrize("kind", ["map", "stream", "begin"])
def test_a_dataset_that_fails_on_one_rank(kind: str, settings: Settings, stage: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, fails, settings, kind, stage)
    failed = 0 if settings is BROADCAST else 1
    text = str(caught.value)
    assert f"--- rank {failed} raised: OSError: the disk is gone" in text
    other = f"--- rank {1 - failed} raised: {RankFailure.__module__}.{RankFailure.__name__}: "
    assert other in text
    assert f"because rank {failed} raised OSError: the disk is gone" in text


def unsendable(rank: int, world_size: int) -> None:
    """A batch that holds a lock."""
    import threading

    rows: Any = [{**row, "lock": threading.Lock()} for row in rows_of(2)]
    data = DataLoader(rows, batch_size=None)
    trainer_of(world_size, BROADCAST).fit(Small(), data)


def test_a_batch_that_cannot_be_sent() -> None:
    expect_on_every_rank(2, unsendable, error=Exception, match="cannot pickle '_thread.lock'")


# -- streams and shards -------------------------------------------------------------------------------


def trains_on_stream(rank: int, world_size: int, settings: Settings, shard: str) -> None:
    ranks = {"none": (0, 1), "world": (rank, world_size), "half": (rank // 2 % 2, 2)}
    data = Stream(rows_of(16), *ranks[shard])
    trainer_of(world_size, settings).fit(Small(), DataLoader(data, 2))


@pytest.mark.parametrize("settings", [FOUR, FOUR_BROADCAST], ids=["check", "broadcast"])
def test_a_stream_that_is_not_sharded(settings: Settings) -> None:
    match = (
        "data ranks 0 and 1 read the same first batch.*strategy.data_rank.*batch_sync='broadcast'"
    )
    expect_on_every_rank(4, trains_on_stream, settings, "none", error=ConfigError, match=match)


@pytest.mark.nightly
def test_a_stream_that_is_sharded_over_the_world() -> None:
    match = "disagree on .*strategy.data_rank.*batch_sync='broadcast'"
    expect_on_every_rank(4, trains_on_stream, FOUR, "world", error=BatchMismatchError, match=match)
    run_ranks(4, trains_on_stream, FOUR, "half")


# -- ranks that do not go together --------------------------------------------------------------------


def goes_alone(rank: int, world_size: int) -> None:
    """One rank validates while the other still trains."""
    loop = Loop(world_size, RING)
    first, second = (loop.batches(4) for _ in range(2))
    next(iter(first if rank else second))


def test_ranks_that_fetch_from_different_loaders() -> None:
    match = "fetched from another loader, or did something else"
    expect_on_every_rank(2, goes_alone, error=BatchMismatchError, match=match)


def stops_early(rank: int, world_size: int) -> None:
    """One rank fetches another batch where the other works on the one it has."""
    loop = Loop(world_size, RING)
    batches = iter(loop.batches(4))
    batch = next(batches)
    if rank:
        next(batches)
    else:
        loop.shard(batch)


def test_a_rank_that_fetches_while_another_works() -> None:
    match = "fetched from another loader|not at the same call"
    expect_on_every_rank(2, stops_early, error=BatchMismatchError, match=match)


def skips_a_batch(rank: int, world_size: int) -> None:
    """The second data rank fetches another batch where the first one shards the one it has."""
    loop = Loop(world_size, FOUR)
    batches = iter(loop.batches(4))
    batch = next(batches)
    if rank < 2:
        loop.shard(batch)
    else:
        next(batches)


def test_a_data_rank_that_skips_a_batch() -> None:
    match = "fetched from another loader|not at the same call"
    expect_on_every_rank(4, skips_a_batch, error=BatchMismatchError, match=match, timeout=15)


def begins_again(rank: int, world_size: int) -> None:
    """One rank begins another pass where the other one fetches."""
    loader = Loop(world_size, BROADCAST).batches(4)
    batches = iter(loader)
    next(batches)
    if rank:
        next(iter(loader))
    else:
        next(batches)


def test_a_rank_that_begins_another_pass() -> None:
    match = "fetched from another loader|not at the same call"
    expect_on_every_rank(2, begins_again, error=BatchMismatchError, match=match, timeout=15)
