"""Runs of which everything that is logged is kept: bar, file, callback and logged metrics, warnings."""

from __future__ import annotations

import csv
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_cp import ContextParallelMixin
from tests.helpers.strategies.small import RING, Settings, Small, loader, trainer_of

DDP: Settings = {"plain": "ddp"}
RING_TWICE: Settings = {**RING, "data_parallel_size": 2}
Report = dict[str, Any]


class Logs(ContextParallelMixin, Small):
    """A module that may say how it is sharded, and may call ``cp_log``."""

    context_parallel_labels = "aligned"


class Watch(pl.Callback):
    """Keeps what the bar, callbacks and loggers see, whenever it may have changed."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def look(self, trainer: pl.Trainer) -> None:
        seen: dict[str, float] = {}
        for what in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            seen |= {f"{what}: {name}": float(x) for name, x in getattr(trainer, what).items()}
        self.seen.append(seen)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.look(trainer)  # what the batch before has left

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.look(trainer)  # what was logged until here, as callbacks that monitor it

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.look(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.look(trainer)

    def on_test_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.look(trainer)

    def on_train_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.look(trainer)


def watched(
    rank: int,
    world_size: int,
    settings: Settings | None,
    kind: Callable[[], Small],
    batches: tuple[int, int] = (9, 5),
    test: bool = True,
    **options: Any,
) -> Report:
    """All that a run shows; ``DDP`` as settings is Lightning's own strategy."""
    if settings == DDP:
        options["strategy"] = DDPStrategy(process_group_backend="gloo")
    if settings is not None and settings.get("data_parallel_size", 0 if settings != DDP else 2) > 1:
        options["use_distributed_sampler"] = True
    watch, module = Watch(), kind()
    options["callbacks"] = [*options.get("callbacks", []), watch]
    options["logger"] = CSVLogger("logs", name="run", version=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(
            world_size, {} if settings == DDP else settings, log_every_n_steps=1, **options
        )
        trainer.fit(module, loader(batches[0]), loader(batches[1]))
        if test:
            trainer.test(module, loader(batches[1]), verbose=False)
    rows: list[dict[str, float]] = []
    if rank == 0:
        with Path("logs/run/version_0/metrics.csv").open() as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    told = sorted(str(x.message) for x in caught if "cp_log" in str(x.message))
    return {"seen": watch.seen, "csv": rows, "told": told, "module": getattr(module, "found", None)}


def same(got: list[dict[str, float]], want: list[dict[str, float]], skip: str = "\n") -> None:
    """The same names with the same values at the same times, but for names with ``skip`` in them."""
    assert len(got) == len(want)
    for have, wanted in zip(got, want, strict=True):
        names = {name for name in wanted if skip not in name}
        assert {name for name in have if skip not in name} == names
        for name in names:
            assert have[name] == pytest.approx(wanted[name], rel=1e-10, nan_ok=True), name


def same_reports(got: Report, want: Report, skip: str = "\n") -> None:
    """Everything but warnings; only rank 0 writes a file."""
    same(got["seen"], want["seen"], skip)
    if got["csv"]:
        same(got["csv"], want["csv"], skip)


class Told(logging.Handler):
    """What our logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("lightning_cp").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("lightning_cp").removeHandler(self)
