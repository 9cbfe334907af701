"""Bytes that a token costs: measured ones are the closed form, to the byte, and slopes those of one rank."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import length
from benchmarks.length import ALL, WAYS, kept_beside, kept_per_layer, main, measured
from benchmarks.step_memory import step
from lightning_cp.bench.model_step import ModelSizes
from tests.helpers.models.later import transformers_version
from tests.helpers.pool import run_ranks

SMALL = ModelSizes(features=32, inner=96, vocabulary=256)
IN_FLOAT32 = replace(SMALL, dtype="float32")


@pytest.mark.nightly
@pytest.mark.parametrize("name", WAYS)
def test_what_is_kept_is_the_closed_form(name: str) -> None:
    settings = WAYS[name]
    for layer, beside, peak in run_ranks(2, _measured, settings, timeout=60):
        assert layer == kept_per_layer(SMALL, settings)
        assert beside == kept_beside(SMALL, settings) + _positions_of_a_cache(settings)
        assert peak > SMALL.layers * layer


def _positions_of_a_cache(settings: Any) -> int:
    """Blocks are given them, in int64, until transformers 5.3, and all share one."""
    recomputes = "activation_checkpointing" in settings
    return 8 if recomputes and transformers_version() < (5, 4) else 0


def _measured(rank: int, world_size: int, settings: Any) -> tuple[float, float, float]:
    return measured(SMALL, settings, 256)


def slope(rank: int, world_size: int) -> float:
    """Of the peak, per local token, where the loss is no longer what decides."""
    lengths = (512, 1024)
    short, long = (step(SMALL, local, ALL).peak for local in lengths)
    return (long - short) / (lengths[1] - lengths[0])


@pytest.mark.nightly
def test_more_ranks_cost_no_more_per_local_token() -> None:
    """So length grows in proportion to ranks."""
    alone = run_ranks(1, slope, timeout=60)[0]
    assert alone > SMALL.layers * kept_per_layer(SMALL, ALL)
    assert max(run_ranks(4, slope, timeout=60)) <= 1.1 * alone


@pytest.fixture(scope="module")
def alone() -> float:
    """The loss of one process, without any setting."""
    return run_ranks(1, _loss, IN_FLOAT32, {})[0]


@pytest.mark.quick("tiled_mlp", '"keep_attention", activation_offload')
@pytest.mark.parametrize("name", WAYS)
def test_settings_change_no_loss(name: str, alone: float) -> None:
    assert run_ranks(2, _loss, IN_FLOAT32, WAYS[name])[0] == pytest.approx(alone, rel=1e-6)


def _loss(rank: int, world_size: int, sizes: ModelSizes, settings: Any) -> float:
    return step(sizes, 512 // world_size, settings).loss


@pytest.mark.nightly  # a process for each row
def test_tables_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(length, "WAYS", {"none": {}})
    sizes = ["--lengths", "64", "128", "--ranks", "1", "2", "--vocabulary", "256"]
    main([*sizes, "--picture", str(tmp_path / "length.png")])
    assert (tmp_path / "length.png").stat().st_size > 10_000
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| none") for line in lines) == 1
    assert [line.split("|")[3].strip() for line in lines if line.startswith("| 2 ")] == [
        *("64", "128", ""),
    ]


def _level_after(rank: int, world_size: int) -> tuple[int, int]:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = logger.level
    step(SMALL, 64, {})
    return before, logger.level


def test_what_lightning_tells_is_told_again_afterwards() -> None:
    before, after = run_ranks(1, _level_after)[0]
    assert after == before != logging.WARNING
