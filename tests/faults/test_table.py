"""Every row of the table of faults; a few of them always, the others among the slow tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.table import Row, every


def _parameters() -> list[Any]:
    return [
        pytest.param(row, id=row.name, marks=() if row.quick else pytest.mark.slow)
        for row in every()
    ]


@pytest.mark.parametrize("row", _parameters())
def test_a_fault(row: Row, tmp_path: Path) -> None:
    row.prove(tmp_path)
