"""Rates by a clock that the test winds, what is left out of them, and runs that are resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_cp import ThroughputCallback
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    LENGTH,
    RING,
    Batch,
    Settings,
    Small,
    loader,
    trainer_of,
)

STEP = 0.5
FLOPS = 6 * (32 * (32 + 16 + 16 + 32 + 3 * 64) + 32 * 48)
"""Of a token of ``Small``, outside of attention."""
PER_STEP = 2 * LENGTH * FLOPS + 12 * 4 * 8 * 2 * LENGTH * (LENGTH + 1) // 2


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Timed(Small):
    """A batch takes half a second, the first one of a run ten more; a save a hundred."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.clock.now += STEP + 10.0 * (self.trainer.global_step == 0)
        return self.loss(batch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.now += 100.0


class Validated(Timed):
    """A validation takes a hundred seconds a batch."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch)
        self.clock.now += 100.0


class Seen(pl.Callback):
    """What callbacks can read of the metrics, before every batch."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        found = trainer.callback_metrics
        self.steps[trainer.global_step] = {
            name: float(x) for name, x in found.items() if name.startswith("throughput/")
        }


def timed(
    rank: int, world: int, settings: Settings | None, options: dict[str, Any], trainer_options: Any
) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    clock = Clock()
    callback, seen = ThroughputCallback(**options), Seen()
    callback._clock = clock
    trainer = trainer_of(world, settings, callbacks=[callback, seen], **trainer_options)
    trainer.fit(Validated(clock), loader(16), loader(4))
    return seen.steps, callback.metrics


@pytest.mark.quick("1-None")
@pytest.mark.parametrize(("ranks", "settings"), [(1, None), (2, RING), (4, HYBRID)])
def test_rates_are_those_of_the_clock(ranks: int, settings: Settings | None) -> None:
    """Eight steps, validated after the fifth: the window of steps 2 to 4, then 5 to 7, then the last."""
    options = {"every_n_steps": 3, "peak_flops": 1e9}
    trainer = {"log_every_n_steps": 1, "val_check_interval": 5, "num_sanity_val_steps": 1}
    tokens, each = 2 * LENGTH, 1 / ranks
    for steps, last in run_ranks(ranks, timed, settings, options, trainer):
        assert not any(steps[step] for step in (1, 2, 3))
        for step in (4, 5, 6, 7):
            of = 4 if step < 7 else 7
            got = steps[step]
            assert got["throughput/tokens"] == of * tokens
            assert got["throughput/model_flops"] == of * PER_STEP
            assert got["throughput/tokens_per_second"] == pytest.approx(tokens / STEP)
            assert got["throughput/tokens_per_second_per_device"] == pytest.approx(
                tokens / STEP * each
            )
            assert got["throughput/seconds_per_step"] == pytest.approx(STEP)
            rate = PER_STEP / STEP * each
            assert got["throughput/tflops_per_device"] == pytest.approx(rate / 1e12)
            assert got["throughput/mfu"] == pytest.approx(rate / 1e9)
        assert last["throughput/tokens"] == 8 * tokens
        assert last["throughput/tokens_per_second"] == pytest.approx(tokens / STEP)


def test_a_window_of_accumulation_is_a_step() -> None:
    options = {"every_n_steps": 2}
    trainer = {"log_every_n_steps": 1, "accumulate_grad_batches": 2}
    ((steps, last),) = run_ranks(1, timed, None, options, trainer)
    assert not steps[2]
    assert steps[3]["throughput/seconds_per_step"] == pytest.approx(2 * STEP)
    assert steps[3]["throughput/tokens_per_second"] == pytest.approx(2 * LENGTH / STEP)
    assert last["throughput/tokens"] == 16 * LENGTH
    assert "throughput/mfu" not in last, "nobody knows the peak of a CPU"


@pytest.mark.parametrize("every", [1, 8])
def test_loggers_get_each_window_once(tmp_path: Path, every: int) -> None:
    """Whatever steps the Trainer itself logs; steps count from 0, as its own."""
    trainer = {"log_every_n_steps": every, "logger": CSVLogger(tmp_path, version=0)}
    run_ranks(1, timed, None, {"every_n_steps": 2}, trainer)
    names, *lines = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().split()
    rows = [dict(zip(names.split(","), line.split(","), strict=True)) for line in lines]
    got = [(row["step"], float(row["throughput/tokens"])) for row in rows]
    assert got == [(str(n - 1), n * 2.0 * LENGTH) for n in (3, 5, 7, 8)]


# -- resuming -----------------------------------------------------------------------------------------


def resumed(
    rank: int, world: int, settings: Settings | None, steps: int, path: str | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Train up to a step, saving after every one, within windows of two batches."""
    clock = Clock()
    callback = ThroughputCallback(every_n_steps=100, warmup_steps=0)
    callback._clock = clock
    checkpoint = ModelCheckpoint("kept", every_n_train_steps=1, save_last=True)
    trainer = trainer_of(
        world,
        settings,
        callbacks=[callback, checkpoint],
        enable_checkpointing=True,
        accumulate_grad_batches=2,
        max_steps=steps,
    )
    trainer.fit(Timed(clock), loader(16), ckpt_path=path)
    saved = torch.load("kept/last.ckpt", weights_only=False) if settings is None else {}
    return callback.metrics, saved.get("callbacks", {})


def in_two_parts(rank: int, world: int, settings: Settings | None) -> list[Any]:
    return [
        resumed(rank, world, settings, 2, None),
        resumed(rank, world, settings, 4, "kept/last.ckpt"),
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "settings"), [(1, None), (2, RING)])
@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable:UserWarning")
def test_a_resumed_run_goes_on_counting(ranks: int, settings: Settings | None) -> None:
    batch = 2 * LENGTH
    for (first, saved), (second, _) in run_ranks(ranks, in_two_parts, settings):
        assert first["throughput/tokens"] == 4 * batch
        assert second["throughput/tokens"] == 8 * batch
        assert second["throughput/model_flops"] == 8 * PER_STEP
        assert first["throughput/seconds_per_step"] == pytest.approx((4 * STEP + 20) / 2)
        assert second["throughput/seconds_per_step"] == pytest.approx(2 * STEP)
        if saved:
            want = {"tokens": 4 * batch, "flops": 4 * PER_STEP, "unknown": 0}
            assert saved["ThroughputCallback"] == want


class SavedMidway(pl.Callback):
    """Saves within a window."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 4:
            trainer.save_checkpoint("midway.ckpt")


def midway(rank: int, world: int, settings: Settings) -> list[float]:
    found: list[float] = []
    for path in (None, "midway.ckpt"):
        callback = ThroughputCallback(every_n_steps=100)
        trainer = trainer_of(
            world, settings, callbacks=[callback, SavedMidway()], accumulate_grad_batches=2
        )
        trainer.fit(Timed(Clock()), loader(16), ckpt_path=path)
        found.append(float(callback._done.tokens))
    return found


@pytest.mark.nightly
def test_a_window_that_is_gone_through_again_counts_once() -> None:
    for found in run_ranks(2, midway, RING):
        assert found == [16 * LENGTH] * 2
