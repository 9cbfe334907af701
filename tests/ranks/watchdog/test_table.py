"""Every row of the table of faults; a few of them always, the others nightly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.installed import ROOT
from tests.nightly.faults.references import REFERENCES
from tests.nightly.faults.table import Row, every


@pytest.mark.quick(
    "SIGKILL of rank 1 of 2 (fabric_spawn, started by Lightning, heard late)",
    "NaN on rank 1 of 2 in loss (trainer, saves=1)",
    "rank 1 of 2 alone calls a part of the model between (trainer, data_parallel=fsdp)",
)
@pytest.mark.parametrize("row", every(), ids=lambda row: row.name)
def test_a_fault(row: Row, tmp_path: Path) -> None:
    row.prove(tmp_path)


def test_references_are_tests() -> None:
    for test in (test for row in REFERENCES for test in row.tests):
        path, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in (ROOT / path).read_text(), test
