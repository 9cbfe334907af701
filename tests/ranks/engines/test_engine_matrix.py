"""Every engine on every mesh gives the losses, gradient norms and weights of one process.

``python -m pytest -m "" -s tests/ranks/engines/test_engine_matrix.py`` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.helpers.strategies.engine_runs import Cell, Errors, errors

TOLERANCE = 1e-10
ENGINES = ("ddp", "fsdp", "hsdp", "zero1")
DRIVERS = ("trainer", "fabric")


def cells() -> list[Cell]:
    """The matrix: at most 8 ranks; of hsdp also copies that are spread over data ranks."""
    spread = [Cell("hsdp", 2, data=4, driver=driver) for driver in DRIVERS]
    return [
        *spread,
        *_regular(),
    ]


def _regular() -> list[Cell]:
    return [
        Cell(engine, cp, data=2 if engine == "hsdp" else 1, driver=driver)
        for engine in ENGINES
        for cp in (2, 4)
        for driver in DRIVERS
    ] + [
        Cell(engine, 2, tp=2, data=2 if engine == "hsdp" else 1, driver=driver)
        for engine in ("fsdp", "hsdp")
        for driver in DRIVERS
    ]


QUICK = {
    Cell("fsdp", 2, driver="trainer"),
    Cell("fsdp", 2, driver="fabric"),
    Cell("zero1", 2, driver="trainer"),
    Cell("hsdp", 2, data=2, driver="fabric"),
    Cell("fsdp", 2, tp=2, driver="trainer"),
}
TABLE: dict[str, Errors] = {}


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    yield
    print("\n| cell | loss | gradient norm | weights |\n|---|---|---|---|")
    for name, found in TABLE.items():
        print(f"| {name} | {found.loss:.1e} | {found.norm:.1e} | {found.weight:.1e} |")


MUON_QUICK = {Cell("zero1", 2, driver="fabric"), Cell("fsdp", 2, tp=2, driver="trainer")}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, marks=() if c in MUON_QUICK else pytest.mark.nightly, id=str(c))
        for c in cells()
    ],
)
def test_twenty_steps_of_muon_equal_one_process(cell: Cell) -> None:
    """Gradients are the engines' own; Newton-Schulz makes more of their last bits than a sum does."""
    TABLE[f"muon {cell}"] = found = errors(replace(cell, optimizer="muon"))
    assert found.worst <= TOLERANCE, found


@pytest.mark.quick("fsdp data 1 cp 2 tp 1 fabric")
@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=() if c in QUICK else pytest.mark.nightly, id=str(c)) for c in cells()],
)
def test_twenty_steps_equal_one_process(cell: Cell) -> None:
    TABLE[str(cell)] = found = errors(cell)
    assert found.worst <= TOLERANCE, found
