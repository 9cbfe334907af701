"""The strategy in a real Trainer: all stages, samplers, seeds, errors, and what users do in steps."""

from __future__ import annotations

import gc
import random
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_cp import ContextParallelCallback, UlyssesRingStrategy
from tests.helpers.pool import RankError, run_ranks
from tests.helpers.strategies.kinds import KINDS, ByName, fitted, plain
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    ULYSSES,
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

# -- one process and many ----------------------------------------------------------------------------


SETTINGS: dict[str, Settings] = {
    "labels are inputs": {"labels": "auto"},
    "two optimizers": {"find_unused_parameters": True},  # as plain DDP needs it
}


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [RING, ULYSSES], ids=["ring", "ulysses"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("small", "named")])
def test_whatever_the_step_does_it_equals_one_process(kind: str, settings: Settings) -> None:
    for got in run_ranks(2, fitted, {**settings, **SETTINGS.get(kind, {})}, kind):
        if kind == "labels are inputs":  # its loss is float32 inside
            torch.testing.assert_close(got, plain(kind), rtol=1e-5, atol=1e-7)
        else:
            close(got, plain(kind))


@pytest.mark.nightly
def test_two_fits_in_a_row() -> None:
    want = plain("small", 2)
    assert not torch.equal(want, plain("small"))
    for got in run_ranks(4, fitted, HYBRID, "small", 2):
        close(got, want)


# -- all stages on one strategy -----------------------------------------------------------------------


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def all_stages(rank: int, world_size: int, settings: Settings) -> list[int]:
    """How many process groups there are, before and after each stage, and in the end."""
    counts = [groups()]
    module = Staged()
    trainer = trainer_of(world_size, settings)
    trainer.fit(module, loader(4), loader(2))
    counts.append(groups())
    mesh = strategy_of(trainer).mesh
    for stage in (trainer.validate, trainer.test, trainer.predict, trainer.validate):
        stage(module, loader(2))
        counts.append(groups())
        assert strategy_of(trainer).mesh is mesh
    trainer.fit(module, loader(4), loader(2))
    counts.append(groups())
    mesh.destroy()
    mesh.destroy()
    counts.append(groups())
    dist.barrier()  # the world group stays
    return counts


def strategy_of(trainer: pl.Trainer) -> UlyssesRingStrategy:
    assert isinstance(trainer.strategy, UlyssesRingStrategy)
    return trainer.strategy


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [HYBRID, {"data_parallel_size": 2, **RING}])
def test_groups_are_made_once_and_destroyed_once(settings: Settings) -> None:
    for before, first, *later, last in run_ranks(4, all_stages, settings):
        assert first > before
        assert later == [first] * len(later)
        assert last == before


def fit_and_count(rank: int, world_size: int) -> int:
    """Native threads after a run; gloo has three for every group."""
    trainer_of(world_size, RING).fit(Small(), loader(2))
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_groups_end_with_their_strategy() -> None:
    """One Trainer after another in one process: their groups' threads and sockets do not pile up."""
    first, *others = [run_ranks(2, fit_and_count) for _ in range(4)]
    assert others[1:] == [others[0]] * 2, (first, others)


def staged(rank: int, world_size: int, settings: Settings | None) -> list[float]:
    """Losses of validation before, in and after training, and of testing."""
    module = Staged()
    trainer = trainer_of(world_size, settings, num_sanity_val_steps=2, val_check_interval=2)
    losses: list[Any] = []
    losses += trainer.validate(module, loader(3), verbose=False)
    trainer.fit(module, loader(8), loader(3))
    losses.append({name: float(x) for name, x in trainer.callback_metrics.items()})
    losses += trainer.validate(module, loader(3), verbose=False)
    losses += trainer.test(module, loader(5), verbose=False)
    return [value for logged in losses for value in logged.values()]


def test_every_stage_reports_what_one_process_does() -> None:
    (want,) = run_ranks(1, staged, None)
    assert len(want) == 4
    assert want[0] != want[2]
    for got in run_ranks(4, staged, HYBRID):
        assert got == pytest.approx(want, rel=1e-10)


def quick(rank: int, world_size: int) -> tuple[int, float]:
    module = Staged()
    trainer = trainer_of(world_size, HYBRID, fast_dev_run=True)
    trainer.fit(module, loader(4), loader(4))
    return trainer.global_step, float(trainer.callback_metrics["val_loss"])


@pytest.mark.nightly
def test_fast_dev_run() -> None:
    results = run_ranks(4, quick)
    assert {steps for steps, _ in results} == {1}
    assert len({loss for _, loss in results}) == 1


# -- who gets which samples, and which random numbers -------------------------------------------------

FOUR: Settings = {**RING, "data_parallel_size": 2}


class Numbered(Dataset[Any]):
    """Samples that know their index, and draw random numbers in the worker that loads them."""

    def __init__(self, count: int) -> None:
        self.rows = samples(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.rand(()).item() + random.random() + np.random.rand()
        ids = self.rows[index]["input_ids"].roll(int(100 * drawn))
        return {**self.rows[index], "input_ids": ids, "index": index, "drawn": drawn}


class Seeing(Staged):
    """Remembers which samples came, and what was drawn for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[Any]] = {"train": [], "val": []}

    def remember(self, stage: str, batch: Batch) -> None:
        self.seen[stage] += zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.remember("train", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.remember("val", batch)


def seen(rank: int, world_size: int) -> dict[str, list[Any]]:
    """Samples of every stage of a run on shuffled data."""
    module = Seeing()
    trainer = trainer_of(world_size, FOUR, use_distributed_sampler=True)
    data = Numbered(12)
    trainer.fit(module, DataLoader(data, 2, shuffle=True), DataLoader(data, 2))
    strategy = strategy_of(trainer)
    assert strategy.data_parallel_size == 2
    assert strategy.data_rank == rank // 2
    used: Any = trainer.train_dataloader
    assert isinstance(used.sampler, DistributedSampler)
    return module.seen


@pytest.mark.nightly
def test_samples_go_to_data_ranks() -> None:
    results = run_ranks(4, seen)
    for stage in ("train", "val"):
        indices = [[index for index, _ in result[stage]] for result in results]
        assert indices[0] == indices[1]
        assert indices[2] == indices[3]
        assert sorted(indices[0] + indices[2]) == list(range(12))
    assert indices[0] == [0, 2, 4, 6, 8, 10]  # validation keeps its order


def drawn(rank: int, world_size: int, settings: Settings | None, seeded: bool) -> list[Any]:
    """(sample, random number drawn for it) in a worker process."""
    module = Seeing()
    pl.seed_everything(5, workers=seeded, verbose=False)
    trainer = trainer_of(world_size, settings, use_distributed_sampler=True)
    data = DataLoader(Numbered(8), 2, num_workers=1, multiprocessing_context="fork")
    trainer.validate(module, data, verbose=False)
    return module.seen["val"]


IN_A_WORKER = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.mark.nightly
@IN_A_WORKER
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler`:UserWarning")  # as with plain DDP
def test_workers_of_ranks_that_share_a_sample_draw_the_same_numbers() -> None:
    results = run_ranks(4, drawn, FOUR, True)
    assert results[0] == results[1]
    assert results[2] == results[3]
    numbers = [{number for _, number in result} for result in results]
    assert len(numbers[0]) == 4
    assert not numbers[0] & numbers[2], "data ranks draw numbers of their own"


@pytest.mark.nightly
@IN_A_WORKER
@pytest.mark.parametrize("seeded", [True, False])
def test_workers_draw_the_numbers_of_one_process(seeded: bool) -> None:
    """With ``seed_everything(workers=True)`` and without."""
    (want,) = run_ranks(1, drawn, None, seeded)
    assert run_ranks(2, drawn, RING, seeded) == [want, want]


# -- errors ------------------------------------------------------------------------------------------


class Failing(Staged):
    """Raises in one of its steps."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def fail(self, at: str) -> None:
        if self.where == at:
            raise ZeroDivisionError(at)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.fail("training")
        return loss

    def on_after_backward(self) -> None:
        self.fail("backward")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.fail("validation")


def failing(rank: int, world_size: int, where: str) -> bool:
    """After the error everything is as it was, and the module trains on."""
    before = F.scaled_dot_product_attention
    module = Failing(where)
    trainer = trainer_of(world_size, RING)
    with pytest.raises(ZeroDivisionError, match=where):
        trainer.fit(module, loader(4), loader(2))
    strategy = strategy_of(trainer)
    assert not strategy.runtime.in_step
    assert "log" not in module.__dict__
    assert F.scaled_dot_product_attention is before
    if rank == 0:  # alone, and therefore without any communication
        module.loss({name: x[None] for name, x in samples(1)[0].items()}).backward()
    module.where = "nowhere"
    module.train().zero_grad()
    trainer_of(world_size, RING).fit(module, loader(4), loader(2))
    return bool(torch.isfinite(weights(module)).all())


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["training", "backward", "validation"])
def test_an_error_in_a_step_leaves_the_plain_model(where: str) -> None:
    assert run_ranks(2, failing, where) == [True, True]


class NoLoss(Small):
    """Means well: where there are no targets, nothing is to be learned."""

    def __init__(self, instead: str) -> None:
        super().__init__()
        self.instead = instead

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if bool((batch["labels"] != -100).any()):
            return loss
        zero = torch.zeros((), requires_grad=True)
        return {"none": None, "constant": zero, "dictionary": {"loss": zero}}[self.instead]


def without_loss(rank: int, world_size: int, instead: str) -> None:
    trainer_of(world_size, RING, accumulate_grad_batches=2).fit(NoLoss(instead), loader(6))


@pytest.mark.parametrize("instead", ["none", "constant", "dictionary"])
def test_a_rank_without_targets_must_not_drop_out(instead: str) -> None:
    """Backward runs through its model, or other ranks would wait for it for ever."""
    with pytest.raises(RankError) as caught:
        run_ranks(2, without_loss, instead, timeout=30)
    text = str(caught.value)
    shown = (
        "no loss" if instead == "none" else r"a loss of 0\.0 that is not computed from the model"
    )
    assert re.search(rf"ConfigError: training_step returned {shown} on a rank whose part", text)
    assert "RankFailure: stopped before any data moved" in text


class LoggingTheGraph(Small):
    """Rank 0 alone calls the model between steps, as loggers do."""

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.global_rank == 0:
            whole = {name: x[None] for name, x in samples(1)[0].items()}
            self.alone = float(self.loss(whole).detach())


def lonely(rank: int, world_size: int) -> float:
    module: Any = LoggingTheGraph()
    trainer_of(world_size, HYBRID).fit(module, loader(4))
    whole = {name: x[None] for name, x in samples(1)[0].items()}
    return module.alone - float(module.loss(whole).detach()) if rank == 0 else 0.0


@pytest.mark.nightly
def test_rank_0_may_call_the_model_between_steps() -> None:
    assert run_ranks(4, lonely) == [0.0] * 4


# -- what else a user may rely on --------------------------------------------------------------------


def by_name(rank: int, world_size: int) -> tuple[Any, ...]:
    trainer = trainer_of(world_size, {}, strategy="ulysses_ring")
    module = ByName()
    trainer.fit(module, loader(8))
    strategy = strategy_of(trainer)
    return strategy.mesh.ulysses_size, strategy.mesh.ring_size, weights(module)


@pytest.mark.nightly
def test_the_strategy_by_name_splits_by_heads() -> None:
    (want,) = run_ranks(1, fitted, None, "named")
    for ulysses, ring, got in run_ranks(4, by_name):
        assert (ulysses, ring) == (4, 1)
        close(got, want)


class Early(Small):
    """Builds its layers when processes exist already."""

    def __init__(self) -> None:
        super().__init__()
        self.at = -1

    def configure_model(self) -> None:
        self.at = self.trainer.strategy.mesh.cp_rank  # type: ignore[attr-defined]


def early(rank: int, world_size: int, settings: Settings) -> int:
    module = Early()
    trainer_of(world_size, settings).fit(module, loader(2))
    return module.at


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [HYBRID, {"num_heads": 4}])
def test_the_mesh_in_configure_model(settings: Settings) -> None:
    assert run_ranks(4, early, settings) == [0, 1, 2, 3]


def saved(rank: int, world_size: int, settings: Settings | None) -> tuple[torch.Tensor, ...]:
    """Trains on from a checkpoint that was saved halfway."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    whole = Small()
    halves = Small()
    for module, resume in ((whole, None), (halves, "kept/epoch=0.ckpt")):
        keep = ModelCheckpoint("kept", filename="{epoch}", save_top_k=-1)
        options: dict[str, Any] = {
            "enable_checkpointing": True,
            "callbacks": [keep],
            "max_epochs": 2,
        }
        trainer_of(world_size, settings, **options).fit(module, loader(4), ckpt_path=resume)
    state = torch.load("kept/epoch=0.ckpt", weights_only=False)["state_dict"]
    return weights(whole), weights(halves), torch.cat([x.flatten() for x in state.values()])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
def test_checkpoints_are_those_of_one_process() -> None:
    (want,) = run_ranks(1, saved, None)
    assert not torch.equal(want[0], want[2])
    for got in run_ranks(2, saved, RING):
        for x, y in zip(got, want, strict=True):
            close(x, y)
        assert torch.equal(got[0], got[1])


class Sentence:
    """A batch that only its owner understands."""

    def __init__(self, rows: list[Any]) -> None:
        self.fields = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def to(self, *_: Any) -> Sentence:
        return self


class Unpacking(ContextParallelCallback):
    """Says what the batch holds."""

    def shard_batch(self, batch: Any, *, needs_labels: bool) -> Any:
        return super().shard_batch(batch.fields, needs_labels=needs_labels)


def with_callback(rank: int, world_size: int, by_class: bool) -> torch.Tensor:
    module, callback = Small(), ContextParallelCallback()
    if by_class:
        callback = Unpacking()
    else:

        def unpack(batch: Any, *, needs_labels: bool) -> Any:
            return callback.runtime.shard(batch.fields, needs_labels=needs_labels)

        callback.shard_batch = unpack  # type: ignore[method-assign]
    trainer = trainer_of(world_size, RING, callbacks=[callback])
    trainer.fit(module, loader(8, collate_fn=Sentence))
    return weights(module)


@pytest.mark.parametrize("by_class", [True, False], ids=["subclass", "instance"])
def test_a_callback_of_the_user_reads_batches(by_class: bool) -> None:
    for got in run_ranks(2, with_callback, by_class):
        close(got, plain("small"))


@pytest.mark.parametrize("settings", [{"context_parallel_size": 1}, {"data_parallel_size": 1}])
def test_one_rank_is_one_process(settings: Settings) -> None:
    assert torch.equal(run_ranks(1, fitted, settings, "small")[0], plain("small"))


class TwoLoaders(Staged):
    """Validates on two sets."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), batch_size=1, sync_dist=True)


def two_loaders(rank: int, world_size: int, settings: Settings | None) -> list[float]:
    trainer = trainer_of(world_size, settings)
    results = trainer.validate(TwoLoaders(), [loader(3), loader(4)], verbose=False)
    return [value for logged in results for value in logged.values()]


@pytest.mark.nightly
def test_several_loaders() -> None:
    (want,) = run_ranks(1, two_loaders, None)
    assert len(want) == 2
    for got in run_ranks(2, two_loaders, RING):
        assert got == pytest.approx(want, rel=1e-10)
