"""Which cells of a test belong to the quick suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
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


def mark_others_slow(cells: Sequence[pytest.Item]) -> None:
    """Mark slow those cells of one test that no pattern of its ``@pytest.mark.quick(*patterns)`` matches.

    For products of several parametrizations, whose quick cells are no product. A pattern is the id of a
    cell, with ``*`` for any text.
    """
    if not cells or (quick := cells[0].get_closest_marker("quick")) is None:
        return
    ids = [cell.name.partition("[")[2].removesuffix("]") for cell in cells]
    unknown = [p for p in quick.args if not any(fnmatchcase(name, p) for name in ids)]
    assert not unknown, f"{cells[0].nodeid} has no such cells: {unknown}"
    for cell, name in zip(cells, ids, strict=True):
        if not any(fnmatchcase(name, pattern) for pattern in quick.args):
            cell.add_marker(pytest.mark.slow)
