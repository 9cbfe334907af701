"""What is said of a count, what is refused, and what is left behind: nothing."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader

from lightning_cp import ThroughputCallback, UlyssesRingStrategy
from lightning_cp.errors import ConfigError
from lightning_cp.throughput.step_flops import ThroughputOptions, dtype_of, peak_of
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import (
    LENGTH,
    Batch,
    Small,
    loader,
    samples,
    trainer_of,
)
from tests.ranks.throughput.test_rates import FLOPS, PER_STEP


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be a whole number of at least 1, got 0"),
        ({"every_n_steps": 2.0}, "50 logs every 50 optimizer steps"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0, got -1"),
        (
            {"peak_flops": 0},
            "peak_flops must be the FLOP/s of one device, a positive number, got 0",
        ),
        ({"peak_flops": "h100"}, "989e12 is an H100"),
        ({"active_parameters": True}, "active_parameters must be a whole number"),
        ({"sequence_dims": 1}, "sequence_dims must map names"),
    ],
)
def test_settings_of_another_kind(option: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ThroughputCallback(**option)


def test_strategies_of_which_too_little_is_known() -> None:
    trainer: Any = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(ConfigError, match=r"under FSDPStrategy: .*strategy='ulysses_ring'"):
        ThroughputCallback().setup(trainer, Small(), "fit")


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312e12),
        ("A card of the next year", torch.bfloat16, None),
        ("NVIDIA GeForce RTX", torch.bfloat16, None),
    ],
)
def test_peaks_are_those_of_lightning_s_table(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    model = torch.nn.Linear(2, 2).to(dtype)
    strategy = UlyssesRingStrategy()
    found = peak_of(ThroughputOptions(), torch.device("cuda"), Precision(), strategy, model)
    assert found.flops == peak
    assert name in found.where
    assert str(dtype).endswith(found.where.rpartition(" ")[2])


def test_the_dtype_is_that_of_matrix_products() -> None:
    model = torch.nn.Linear(2, 2)
    plain, bf16 = UlyssesRingStrategy(), MixedPrecision("bf16-mixed", "cpu")
    cast = UlyssesRingStrategy(data_parallel="fsdp", mixed_precision="bfloat16")
    assert dtype_of(Precision(), plain, model) == torch.float32
    assert dtype_of(bf16, plain, model) == torch.bfloat16
    assert dtype_of(Precision(), cast, model) == torch.bfloat16
    assert dtype_of(Precision(), plain, model.half()) == torch.float16


class Odd(Small):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(48, 48))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch) + self.table.sum() * 0


def said(rank: int, world: int, odd: bool, options: dict[str, Any]) -> tuple[str, dict[str, float]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    callback = ThroughputCallback(**options)
    try:
        trainer_of(1, None, callbacks=[callback]).fit(Odd() if odd else Small(), loader(8))
    finally:
        logger.removeHandler(handler)
    return "\n".join(line for line in lines if "throughput" in line), callback.metrics


@pytest.mark.nightly
def test_the_convention_is_said_once() -> None:
    ((text, metrics),) = run_ranks(1, said, False, {})
    assert text.count("MFU counts model FLOPs") == 1
    assert f"6 x {FLOPS // 6:,} parameters per token" in text
    assert "causal: only visible pairs" in text
    assert text.count("MFU is not logged: the peak FLOP/s of cpu is unknown. Set peak_flops=") == 1
    assert "throughput/tflops_per_device" in metrics
    assert "throughput/mfu" not in metrics
    ((text, metrics),) = run_ranks(1, said, False, {"peak_flops": 2.5e12})
    assert "It assumes a peak of 2.5 TFLOP/s per device (peak_flops=)" in text
    assert "throughput/mfu" in metrics


@pytest.mark.nightly
def test_flops_that_are_not_known_are_not_logged() -> None:
    ((text, metrics),) = run_ranks(1, said, True, {"peak_flops": 1e12})
    assert text.count("it is unknown how often table multiply a token") == 1
    assert set(metrics) & {"throughput/mfu", "throughput/tflops_per_device"} == set()
    assert metrics["throughput/tokens"] == 8 * LENGTH
    ((text, metrics),) = run_ranks(1, said, True, {"active_parameters": FLOPS // 6})
    assert metrics["throughput/model_flops"] == 4 * PER_STEP


class Unreadable(Small):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss({"input_ids": batch["tokens"], "labels": batch["targets"]})


def renamed(rank: int, world: int, dims: dict[str, int] | None) -> dict[str, float]:
    callback = ThroughputCallback(sequence_dims=dims)
    rows: Any = [{"tokens": x["input_ids"], "targets": x["labels"]} for x in samples(8)]
    trainer_of(1, None, callbacks=[callback]).fit(Unreadable(), DataLoader(rows, batch_size=2))
    return callback.metrics


@pytest.mark.nightly
def test_batches_with_names_of_their_own() -> None:
    with pytest.raises(Exception, match=r"tokens of this batch cannot be counted.*sequence_dims="):
        run_ranks(1, renamed, None)
    (metrics,) = run_ranks(1, renamed, {"tokens": 1, "targets": 1})
    assert metrics["throughput/tokens"] == 8 * LENGTH


def refit(rank: int, world: int) -> tuple[int, int, bool]:
    """Hooks and replacements are gone after a fit, and after an error."""
    module, callback = Small(), ThroughputCallback()
    before = torch.nn.functional.scaled_dot_product_attention
    trainer = trainer_of(1, None, callbacks=[callback])
    trainer.fit(module, loader(4))
    module.loss = lambda batch: 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        trainer_of(1, None, callbacks=[callback]).fit(module, loader(4))
    hooks = sum(len(part._forward_pre_hooks) for part in module.modules())
    same = torch.nn.functional.scaled_dot_product_attention is before
    return hooks, len([x for x in vars(trainer) if x == "save_checkpoint"]), same


def test_nothing_is_left_behind() -> None:
    assert run_ranks(1, refit) == [(0, 0, True)]
