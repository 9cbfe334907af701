"""Every row of the table of faults; a few of them always, the others among the slow tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.references import REFERENCES
from tests.faults.table import Row, every
from tests.installed import ROOT


def _parameters() -> list[Any]:
    return [
        pytest.param(row, id=row.name, marks=() if row.quick else pytest.mark.slow)
        for row in every()
    ]


@pytest.mark.quick(
    "SIGKILL of rank 0*",
    "SIGKILL of rank 2 of 2 x 2*",
    "*data_parallel=fsdp)",
    "* raises,*",
    "NaN*",
)
@pytest.mark.parametrize("row", _parameters())
def test_a_fault(row: Row, tmp_path: Path) -> None:
    row.prove(tmp_path)


def test_references_are_tests() -> None:
    for test in (test for row in REFERENCES for test in row.tests):
        path, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in (ROOT / path).read_text(), test
