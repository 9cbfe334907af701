"""The peak of real steps is what the planner says: its growth with length, and all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.plan_validation.memory import (
    COLUMNS,
    LAYERS_DECIDE,
    LOGITS_DECIDE,
    Cell,
    CellComparison,
    Measured,
    cells_of,
    compare,
    every_cell,
    measured_steps,
    predicted_optimizer,
    rows,
)
from lightning_cp.utils import console as table
from tests.helpers.pool import run_ranks

FEW = (128, 512)
CLOSE = 0.01
"""Closer than what is promised, so that a tensor that is forgotten is seen."""


def on_ranks(rank: int, world_size: int, cells: Sequence[Cell]) -> list[Measured]:
    return measured_steps(cells)


def compared(cells: Sequence[Cell], timeout: float = 60) -> list[CellComparison]:
    (ranks,) = {cell.ranks for cell in cells}
    return compare(cells, run_ranks(ranks, on_ranks, cells, timeout=timeout)[0])


def expect_all_hold(found: Sequence[CellComparison]) -> None:
    shown = table.markdown_table(COLUMNS, rows(found))
    assert all(one.holds for one in found), shown
    assert all(abs(one.ratio - 1) < CLOSE for one in found), shown
    for one in found:
        assert predicted_optimizer(one.cell) == pytest.approx(one.measured.optimizer, rel=0.01)


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_peaks_and_their_growth_are_predicted(engine: str) -> None:
    found = compared(
        [
            *cells_of([LAYERS_DECIDE], ["blocks, chunked_loss"], [2], [engine], FEW),
            *cells_of([LOGITS_DECIDE], ["none"], [2], [engine], FEW),
        ]
    )
    expect_all_hold(found)
    assert "block" in found[0].decides
    assert "loss" in found[-1].decides


def test_a_rank_of_its_own_and_float32() -> None:
    sizes = replace(LAYERS_DECIDE, dtype="float32")
    expect_all_hold(compared(cells_of([sizes], ["none"], [1], ["fsdp"], FEW)))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("name", ["none", "blocks, chunked_loss"])
def test_of_other_families(family: str, name: str) -> None:
    sizes = replace(LAYERS_DECIDE, family=family)
    for engine in ("ddp", "fsdp"):
        expect_all_hold(compared(cells_of([sizes], [name], [2], [engine], FEW), 200))


def test_where_parameters_decide_and_the_head_is_its_own() -> None:
    """Few tokens: the second block needs most, between a neighbour that arrives and one that is added."""
    sizes = replace(LAYERS_DECIDE, tied=False, layers=4)
    cells = cells_of([sizes], ["blocks, chunked_loss"], [2], ["fsdp"], [16, 24])
    expect_all_hold(compared(cells, 200))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_cell(ranks: int, engine: str, dtype: str) -> None:
    asked = (ranks, engine, dtype)
    cells = [x for x in every_cell() if (x.ranks, x.engine, x.sizes.dtype) == asked]
    expect_all_hold(compared(cells, 280))
