"""What is logged is what one process logs: callback metrics, the progress bar and the CSV file."""

from __future__ import annotations

import copy
import csv
import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import Batch, Small, alone, loader, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You called .*needs to be floating:UserWarning"),
    # Outside of steps values are logged as they are; Lightning cannot know that ranks have the same.
    pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True:UserWarning"),
]

Settings = dict[str, Any]
SETTINGS: dict[str, Settings] = {
    "ring": {"ring_size": 2, "ulysses_size": 1},
    "ulysses": {"ring_size": 1, "ulysses_size": 2},
    "hybrid": {"ring_size": 2, "ulysses_size": 2},
}
DDP: Settings = {"plain": "ddp"}
RANKS = {"ring": 2, "ulysses": 2, "hybrid": 4}


class Logging(Small):
    """Logs its loss, and functions of it, in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.perplexity = Perplexity(ignore_index=-100)
        self.mean = MeanMetric()
        self.total = 0.0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("bar", loss, True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log(name="by_name", value=loss.detach().reshape(1))
        self.log("half", loss.float())
        self.log("number", float(loss.detach()))
        self.log("numpy", np.float64(loss.item()))
        self.log("numpy_single", np.float32(loss.item()))  # type: ignore[arg-type]
        self.log("count", batch_idx)
        self.log("flag", torch.tensor(batch_idx))
        self.log_dict({"a": loss, "b": 2 * loss})
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("zero", 0.5, rank_zero_only=True)
        return loss

    def on_after_backward(self) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("raw_norm", torch.stack(norms).norm())

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.log("before", torch.tensor(3.0 + batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.log("after", torch.tensor(5.0 + batch_idx))
        self.total += 1

    def on_train_epoch_end(self) -> None:
        self.log("steps", self.total)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self.logits(batch)
        loss = self.loss(batch)
        targets = batch["labels"]
        self.perplexity.update(logits, targets)
        valid = int((targets != -100).sum())
        if valid:
            self.mean.update(loss, weight=valid)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_rows", loss, batch_size=len(targets), sync_dist=True)
        self.log("val_even", loss, batch_size=1, sync_dist=True)
        self.log("val_plain", loss, batch_size=1)
        self.log("val_step", loss, on_step=True, on_epoch=True, batch_size=1)
        self.log_dict({"val_d": loss, "val_e": -loss}, sync_dist=True, batch_size=1)
        self.log("val_largest", loss, reduce_fx="max", batch_size=1)
        self.log("perplexity", self.perplexity, on_step=False, on_epoch=True)
        self.log("val_mean", self.mean, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_end", 4.5)
        self.log("computed", self.mean.compute())

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=1)


class Reading(pl.Callback):
    """A callback logs as well, and reads what the progress bar shows."""

    def __init__(self) -> None:
        self.bar: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        pl_module.log("from_callback", 7.0)
        self.bar.append(float(trainer.progress_bar_metrics["bar"]))


def logged(rank: int, world_size: int, settings: Settings | None, **more: Any) -> dict[str, Any]:
    """Everything that a run leaves behind."""
    reading = Reading()
    module = Logging()
    logger = CSVLogger("logs", name="run", version=0)
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "callbacks": [reading]}
    if settings == DDP:
        options["strategy"] = DDPStrategy(process_group_backend="gloo")
        settings = {}
    trainer = trainer_of(world_size, settings, **options, **more)
    trainer.fit(module, loader(9), loader(5))
    found: dict[str, Any] = {"bar": reading.bar}
    found["fit"] = {name: float(x) for name, x in trainer.callback_metrics.items()}
    found["test"] = trainer.test(module, loader(5), verbose=False)
    if rank == 0:
        with Path("logs/run/version_0/metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        found["csv"] = [{k: float(v) for k, v in row.items() if v} for row in rows]
    return found


@lru_cache(maxsize=1)
def plain() -> dict[str, Any]:
    (want,) = run_ranks(1, logged, None)
    assert len(want["fit"]) > 25
    assert len(want["csv"]) >= 5
    losses = [row["loss"] for row in want["csv"] if "loss" in row]
    assert max(losses) - min(losses) > 0.01, "steps can be told apart"
    return want


def same(got: dict[str, float], want: dict[str, float]) -> None:
    """The same names with the same values; what is float32 or float16 on the way is compared as such."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        loose = name.startswith(("half", "numpy_single", "number", "numpy"))
        assert got[name] == pytest.approx(value, rel=1e-6 if loose else 1e-10), name


def compare(got: dict[str, Any], want: dict[str, Any]) -> None:
    """One rank's report with another's."""
    assert got.keys() == want.keys()
    same(got["fit"], want["fit"])
    same(got["test"][0], want["test"][0])
    assert got["bar"] == pytest.approx(want["bar"], rel=1e-10)
    for row, wanted in zip(got.get("csv", []), want.get("csv", []), strict=True):
        same(row, wanted)


def without_file(want: dict[str, Any]) -> dict[str, Any]:
    """Only rank 0 writes one."""
    return {name: value for name, value in want.items() if name != "csv"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_logged_is_what_one_process_logs(name: str) -> None:
    first, *others = run_ranks(RANKS[name], logged, SETTINGS[name])
    compare(first, plain())
    for other in others:
        compare(other, without_file(plain()))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler`:UserWarning")
def test_data_parallel_ranks_log_what_plain_ddp_logs() -> None:
    """Each group of ranks that shares samples is one rank of plain DDP, with ``sync_dist`` or without."""
    want = run_ranks(2, logged, DDP, use_distributed_sampler=True)
    settings = {**SETTINGS["ring"], "data_parallel_size": 2}
    got = run_ranks(4, logged, settings, use_distributed_sampler=True)
    assert want[0]["fit"]["val_plain"] != pytest.approx(want[1]["fit"]["val_plain"])
    assert want[0]["fit"]["val_even"] == pytest.approx(want[1]["fit"]["val_even"])
    compare(got[0], want[0])
    compare(got[1], without_file(want[0]))
    compare(got[2], want[1])
    compare(got[3], want[1])


class OneRankLogs(Small):
    """What only some ranks log, inside a step: Lightning lets them."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.global_rank == 0:
            self.log("rate", 0.125)
        self.log("loss", loss)
        if self.global_rank == 1:
            self.log("other", 9.0)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.log("val_rate", 0.25, batch_size=1)
        self.log("val_loss", self.loss(batch), batch_size=1)


def one_rank_logs(rank: int, world_size: int, settings: Settings | None) -> dict[str, float]:
    trainer = trainer_of(world_size, settings)
    trainer.fit(OneRankLogs(), loader(4), loader(2))
    return {name: float(x) for name, x in trainer.callback_metrics.items()}


def test_a_rank_may_log_alone() -> None:
    (want,) = run_ranks(1, one_rank_logs, None)
    first, second = run_ranks(2, one_rank_logs, SETTINGS["ring"], timeout=30)
    assert first == pytest.approx(want, rel=1e-10)
    own = {"loss": want["loss"], "other": 9.0, "val_loss": want["val_loss"]}
    assert second == pytest.approx(own, rel=1e-10)


class Copying(pl.Callback):
    """Keeps a copy of the module as it is while it trains, and one that was pickled; only rank 0 does."""

    copies: tuple[Any, ...] = ()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        pl_module.log("own", 3.0)
        trainer_, pl_module._trainer = pl_module._trainer, None
        self.copies = copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))
        pl_module._trainer = trainer_


class Ending(Small):
    """Has a hook of its own, and logs in it."""

    ended = 0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.log("loss", loss := self.loss(batch))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.ended += 1


def copied(rank: int, world_size: int) -> list[int]:
    copying = Copying()
    module = Ending()
    callbacks = [copying] if rank == 0 else []
    trainer_of(world_size, SETTINGS["ring"], callbacks=callbacks).fit(module, loader(4))
    counts: list[int] = []
    for other in copying.copies:
        before = other.ended
        alone()
        torch.set_default_dtype(torch.float64)
        trainer_of(1, None).fit(other, loader(4))
        counts.append(other.ended - before)
    return [*counts, module.ended]


def test_copies_of_a_module_are_modules_of_their_own() -> None:
    """Made by a callback that only one rank has, while the module trains."""
    assert run_ranks(2, copied, timeout=60) == [[2, 2, 2], [2]]


class OwnHook(pl.Callback):
    """Logs after a batch."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        pl_module.log("own", 3.0)


def logged_by_one_callback(rank: int, world_size: int) -> dict[str, float]:
    callbacks = [OwnHook()] if rank == 0 else []
    trainer = trainer_of(world_size, SETTINGS["ring"], callbacks=callbacks)
    trainer.fit(Small(), loader(4))
    return {name: float(x) for name, x in trainer.callback_metrics.items()}


def test_a_callback_that_only_one_rank_has_may_log() -> None:
    """The module has no hooks, so that only this rank knows of one."""
    assert run_ranks(2, logged_by_one_callback, timeout=30) == [{"own": 3.0}, {}]


class LogsNumbers(Small):
    """Logs numbers of Python that float32 does not hold."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.log_dict({"tenth": 0.1, "many": 123_456_789.0})
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.log("hook", 0.3)


def numbers_logged(
    rank: int, world_size: int, settings: dict[str, Any] | None
) -> dict[str, tuple[float, str]]:
    torch.set_default_dtype(torch.float32)
    if settings is None:
        alone()
    trainer = trainer_of(world_size, settings, precision="64-true")
    trainer.fit(LogsNumbers(), loader(2))
    return {name: (float(x), str(x.dtype)) for name, x in trainer.callback_metrics.items()}


def test_numbers_of_a_step_in_double_precision_are_logged_as_they_are() -> None:
    (want,) = run_ranks(1, numbers_logged, None)
    assert want["tenth"] == (0.1, "torch.float64")
    assert run_ranks(2, numbers_logged, SETTINGS["ring"]) == [want, want]
