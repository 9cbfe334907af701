"""Which cells of a test belong to the quick suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def slow_but(*quick: str, of: Mapping[str, Any]) -> list[Any]:
    """Cells of ``of`` by their names: those in ``quick`` run always, the others in the slow suite.

    Several arguments of a cell are a tuple.
    """
    assert set(quick) <= set(of), f"no such cells: {sorted(set(quick) - set(of))}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=name,
            marks=[] if name in quick else [pytest.mark.slow],
        )
        for name, value in of.items()
    ]
