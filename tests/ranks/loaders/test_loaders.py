"""Loaders of all kinds: the run of one process, whoever reads; and nobody waits for ever."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError, ShapeError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import (
    RING,
    RING3,
    Batch,
    Settings,
    Small,
    Staged,
    close,
    loader,
    samples,
    trainer_of,
    weights,
)
from tests.helpers.strategies.streams import Nobody, Noisy, Stream, loader_of, rows_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
BROADCAST: Settings = {**RING, "batch_sync": "broadcast"}
KINDS = [
    "stream",
    "sized stream",
    "iterable",
    "drawing",
    "shuffled",
    "shuffled, own generator",
    "with replacement",
    "weighted",
    "batch sampler",
    "worker",
]
IN_A_WORKER = pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning", "ignore:Your `IterableDataset` has `__len__`"
)


def trained(rank: int, world_size: int, settings: Settings | None, kind: str) -> Any:
    """Weights and validation losses of a run with all that interrupts a pass through a loader."""
    module = Noisy()
    reads = settings is None or rank == 0 or settings.get("batch_sync") != "broadcast"
    training: Any = loader_of(kind, rows_of(8)) if reads else DataLoader(Nobody())
    validation: Any = loader_of("stream", rows_of(6)) if reads else DataLoader(Nobody())
    trainer = trainer_of(
        world_size,
        settings,
        max_epochs=3,
        max_steps=7,
        num_sanity_val_steps=1,
        val_check_interval=2,
        limit_val_batches=2,
    )
    trainer.fit(module, training, validation)
    (validated,) = trainer.validate(module, validation, verbose=False)
    assert reads or trainer.global_step
    drawn = torch.rand(2)  # what is drawn afterwards is what one process would draw
    return weights(module), trainer.global_step, *validated.values(), drawn


@lru_cache(maxsize=32)
def alone(kind: str) -> Any:
    return run_ranks(1, trained, None, kind)[0]


@pytest.mark.nightly
@IN_A_WORKER
@pytest.mark.parametrize("settings", [RING, BROADCAST], ids=["check", "broadcast"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_loader_equals_one_process(kind: str, settings: Settings) -> None:
    want = alone(kind)
    for got in run_ranks(2, trained, settings, kind):
        close(got, want)


# -- several loaders ----------------------------------------------------------------------------------


class Joined(Staged):
    """Two batches are one step: rows of one batch, after the transfer and before they are sharded."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if "a" not in batch:
            return batch
        parts = [part for part in (batch["a"], batch["b"]) if part is not None]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class Seeded(Joined, Noisy):
    """Lightning seeds again where it starts processes, and only there."""


class Several(Joined):
    """Evaluates on several sets."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().predict_step(batch, batch_idx)


def combined(rank: int, world_size: int, settings: Settings | None, mode: str) -> Any:
    """Trains on pairs of batches; of one loader and a stream, of different lengths."""
    module, trainer = Seeded(), trainer_of(world_size, settings, max_epochs=2)
    loaders: Any = {"a": loader_of("shuffled", rows_of(6)), "b": loader_of("stream", rows_of(10))}
    trainer.fit(module, CombinedLoader(loaders, mode) if mode != "dict" else loaders)  # type: ignore[arg-type]
    return weights(module), trainer.global_step


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [RING, BROADCAST], ids=["check", "broadcast"])
@pytest.mark.parametrize("mode", ["dict", "min_size", "max_size", "max_size_cycle"])
def test_training_on_several_loaders(mode: str, settings: Settings) -> None:
    (want,) = run_ranks(1, combined, None, mode)
    assert want[1] == (6 if mode == "min_size" else 10)
    for got in run_ranks(2, combined, settings, mode):
        close(got, want)


def apart(rank: int, world_size: int, lengths: list[int], label_key: str) -> None:
    """Two losses in one step, each over its own targets."""
    dims = {f"{name}.{key}": 1 for name in "ab" for key in ("input_ids", "labels")}
    settings = {**RING, "sequence_dims": dims, "label_key": label_key}
    rows: Any = [samples(4, size) for size in lengths]
    loaders = {name: DataLoader(data, 2) for name, data in zip("ab", rows, strict=True)}
    trainer_of(world_size, settings).fit(Small(), loaders)


@pytest.mark.parametrize(
    ("lengths", "label_key", "error", "match"),
    [
        ([29, 31], "a.labels", ShapeError, r"one length, got \{'a.input_ids': 29.*on_after_batch"),
        ([29, 29], "labels", ConfigError, r"no key 'labels' among \['a.input_ids', 'a.labels', 'b"),
        (
            [29, 29],
            "a.labels",
            ConfigError,
            "several labels, 'a.labels', 'b.labels'.*label_key='a.labels'.*concatenate their rows",
        ),
    ],
)
def test_two_losses_in_one_step(
    lengths: list[int], label_key: str, error: type[Exception], match: str
) -> None:
    expect_on_every_rank(2, apart, lengths, label_key, error=error, match=match)


def evaluated(rank: int, world_size: int, settings: Settings | None) -> Any:
    """Metrics by name, and predictions, of several loaders in a row."""
    module, trainer = Several(), trainer_of(world_size, settings)
    loaders: Any = [loader_of("batch sampler", rows_of(6)), loader_of("stream", rows_of(4))]
    found = trainer.validate(module, loaders, verbose=False)
    found += trainer.test(module, loaders, verbose=False)
    outputs: Any = trainer.predict(module, [loaders[1], loader_of("sized stream", rows_of(2))])
    return {name: value for logged in found for name, value in logged.items()}, outputs


@pytest.mark.nightly
@IN_A_WORKER
@pytest.mark.parametrize("settings", [RING, BROADCAST], ids=["check", "broadcast"])
def test_evaluation_on_several_loaders(settings: Settings) -> None:
    (want,) = run_ranks(1, evaluated, None)
    names = [f"{stage}_loss/dataloader_idx_{at}" for stage in ("val", "test") for at in (0, 1)]
    assert sorted(want[0]) == sorted(names)
    assert [len(outputs) for outputs in want[1]] == [2, 1]
    for got in run_ranks(2, evaluated, settings):
        close(got, want)


def twice(rank: int, world_size: int, settings: Settings | None) -> Any:
    """A user's CombinedLoader, in which Lightning keeps the loaders that it was given back."""
    loaders = CombinedLoader([loader_of("stream", rows_of(6))], "min_size")
    module = Joined()
    module.on_after_batch_transfer = lambda batch, dataloader_idx: batch[0]  # type: ignore[method-assign]
    for _ in range(2):
        trainer_of(world_size, settings).fit(module, loaders)
    return weights(module)


@pytest.mark.nightly
def test_a_combined_loader_in_two_runs() -> None:
    (want,) = run_ranks(1, twice, None)
    for got in run_ranks(2, twice, RING):
        close(got, want)


def overfitted(rank: int, world_size: int, settings: Settings | None) -> torch.Tensor:
    """Two batches, again and again, in an order that is not shuffled."""
    module = Staged()
    data = loader_of("shuffled", rows_of(8))
    trainer_of(world_size, settings, overfit_batches=2, max_epochs=2).fit(module, data, data)
    return weights(module)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:You requested to overfit", "ignore:.*shuffling enabled")
def test_overfitting() -> None:
    (want,) = run_ranks(1, overfitted, None)
    for settings in (RING, BROADCAST):
        for got in run_ranks(2, overfitted, settings):
            close(got, want)


# -- data ranks ---------------------------------------------------------------------------------------


def streamed(rank: int, world_size: int, settings: Settings | None) -> torch.Tensor:
    """Trains on this data rank's share of a stream; without settings under plain DDP."""
    options: dict[str, Any] = {"strategy": DDPStrategy()} if settings is None else {}
    options |= {"plugins": [PoolEnvironment()]}
    trainer = trainer_of(world_size, settings or {}, **options)
    module, data_rank = Staged(), rank * 2 // world_size
    reads = settings is None or "batch_sync" not in settings or rank % 2 == 0
    data: Any = Stream(rows_of(12), data_rank, 2) if reads else Nobody()
    trainer.fit(module, DataLoader(data, 2))
    return weights(module)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [RING, BROADCAST], ids=["check", "broadcast"])
def test_data_ranks_that_shard_a_stream_equal_plain_ddp(settings: Settings) -> None:
    want, same = run_ranks(2, streamed, None)
    close(same, want)
    for got in run_ranks(4, streamed, {**settings, "data_parallel_size": 2}):
        close(got, want)


# -- what belongs to a loader -------------------------------------------------------------------------


class Resumable(DataLoader[Any]):
    """Goes on after the batches that were given out, in this run or in the one that was saved."""

    given = 0

    def __iter__(self) -> Any:
        for at, batch in enumerate(super().__iter__()):
            if at >= self.given:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def resumed(rank: int, world_size: int, settings: Settings | None) -> tuple[torch.Tensor, ...]:
    """Saves in the middle of an epoch, and goes on from there with another Trainer."""
    found: list[torch.Tensor] = []
    for resume in (None, "kept/step=2.ckpt"):
        keep = ModelCheckpoint("kept", filename="{step}", every_n_train_steps=2, save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keep]}
        module = Staged()
        data: Any = Resumable(rows_of(10), 2)  # type: ignore[arg-type]
        trainer_of(world_size, settings, **options).fit(module, data, ckpt_path=resume)
        found.append(weights(module))
    return tuple(found)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
@pytest.mark.parametrize("settings", [RING, BROADCAST], ids=["check", "broadcast"])
def test_a_loader_with_a_state_goes_on_where_it_was(settings: Settings) -> None:
    ((want, same),) = run_ranks(1, resumed, None)
    close(same, want)
    for got in run_ranks(2, resumed, settings):
        close(got, (want, want))


def attributes(rank: int, world_size: int) -> bool:
    """Lightning and users see the loader: its dataset, sampler and length, and set what is its own."""
    trainer = trainer_of(world_size, RING)
    rows = rows_of(4)
    inner = loader_of("worker", rows)
    trainer.fit(Staged(), inner)
    found: Any = trainer.train_dataloader
    assert found is not inner
    assert found.dataset is rows
    assert found.sampler is inner.sampler
    assert len(found) == len(inner) == 2
    assert found.state_dict() == {}, "Lightning warns where there is none"
    assert found.state_dict() == {}, (
        "Lightning asks for one, and warns without; ours is in the checkpoint"
    )
    assert inner._iterator is None, "Lightning ended the workers, and the loader can be used again"
    found.prefetch_factor = 7
    return inner.prefetch_factor == 7 and len(list(inner)) == 2


@pytest.mark.nightly
@IN_A_WORKER
def test_a_loader_keeps_its_attributes() -> None:
    assert run_ranks(2, attributes) == [True, True]


SUGGESTED = "lightning.pytorch.trainer.connectors.data_connector.suggested_max_num_workers"


def warned(rank: int, world_size: int, settings: Settings) -> tuple[list[str], tuple[bool, type]]:
    """What a run says of its loader's workers where there could be seven; and the Trainer's loader."""
    trainer = trainer_of(world_size, settings)
    with warnings.catch_warnings(record=True) as seen, mock.patch(SUGGESTED, return_value=7):
        warnings.simplefilter("always")
        trainer.fit(Small(), loader(4))
    its: Any = trainer.train_dataloader
    texts = [str(one.message) for one in seen if "many workers" in str(one.message)]
    return texts, (isinstance(its, DataLoader), type(its.dataset))


@pytest.mark.parametrize(("ranks", "settings"), [(2, RING), (3, RING3)], ids=["ring", "ring 3"])
def test_the_first_rank_warns_once_of_few_workers(ranks: int, settings: Settings) -> None:
    (first, *others), loaders = zip(*run_ranks(ranks, warned, settings), strict=True)
    (text,) = first
    assert text.startswith("The 'train_dataloader' does not have many workers")
    assert not any(others)
    assert set(loaders) == {(True, list)}
