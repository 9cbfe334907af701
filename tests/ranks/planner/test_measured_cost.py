"""Cells of predicted against measured CPU-seconds, end to end; how near they are decides nothing here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_validation import cost as module
from benchmarks.plan_validation.cost import (
    Cell,
    as_asked,
    measured_cost,
    predicted_cost,
    summary_of,
    table_of,
    terms_of,
)
from benchmarks.plan_validation.cpu_seconds import CpuSeconds, send_costs
from lightning_cp.bench.model_step import ModelSizes
from lightning_cp.errors import ConfigError
from lightning_cp.planner.machines import machine_of_hardware
from tests.helpers.planner.measured import MEASURED
from tests.helpers.pool import call_on_ranks

TINY = ModelSizes(256, 8, 4, 32, 1, 64, "float32")


def cell(predicted: float, measured: float = 1.0) -> Cell:
    return Cell("ring", 2, 1024, CpuSeconds(predicted, 0, 0, 0, 0, 0, 0), measured, 0.1)


@pytest.mark.nightly
def test_cells_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three modes of two ranks, two lengths."""
    monkeypatch.setattr(module, "on_ranks", call_on_ranks)
    cells = measured_cost(MEASURED, sizes=TINY, lengths=(64, 512), cp_sizes=(2,), repeats=2)
    named = [(one.mode, one.cp, one.tokens) for one in cells]
    modes = ("ring", "ulysses", "zigzag_llama3")
    assert named == [(mode, 2, tokens) for mode in modes for tokens in (64, 512)]
    assert all(one.measured > 0 and one.predicted.total > 0 for one in cells)
    assert all(one.spread is not None and one.spread >= 0 for one in cells)
    for shown in (table_of(cells), terms_of(cells)):
        lines = shown.splitlines()
        assert len(lines) == 2 + len(cells)
        assert [line.split("|")[1].strip() for line in lines[2:]] == [mode for mode, *_ in named]


def test_at_least_24_cells() -> None:
    cells = [(cp, mode) for cp, ways in module.WAYS.items() for mode in ways]
    assert len(cells) * len(module.LENGTHS) >= 24
    assert {mode for _, mode in cells} >= {"ring", "ulysses", "hybrid", "zigzag_llama3"}
    assert set(module.WAYS) == {1, 2, 4}


def test_summary() -> None:
    near = [cell(1.05), cell(0.95), cell(0.8)]
    assert "3 cells: median error 5.0%" in summary_of(near)
    assert "0.800 to 1.050" in summary_of(near)
    assert as_asked(near)
    assert summary_of(near).endswith(": as asked")
    for far in ([*near, cell(1.4)], [*near, cell(0.7)], [cell(1.11), cell(1.2), cell(1.0)]):
        assert not as_asked(far)
        assert summary_of(far).endswith("NOT as asked")


def test_ratio_is_of_the_total() -> None:
    assert cell(3.0, 2.0).ratio == 1.5


def test_what_was_not_measured_is_told_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "on_ranks", None)
    silent = replace(MEASURED, links=MEASURED.links[:-1])
    with pytest.raises(ConfigError, match="all-reduce takes of a processor was not measured"):
        measured_cost(silent, cp_sizes=(1,))


def test_ranks_that_share_nothing_train_on_rows_of_their_own() -> None:
    machine, sending = machine_of_hardware(MEASURED), send_costs(MEASURED)
    alone = predicted_cost(machine, sending, TINY, 1, "alone", 512)
    shared = predicted_cost(machine, sending, TINY, 2, "ulysses", 512)
    assert alone.products == pytest.approx(2 * shared.products)
