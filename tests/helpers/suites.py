"""Which cells of a test belong to the quick suite, and which to the nightly one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import pytest


def nightly_but(*quick: str, of: Mapping[str, Any]) -> list[Any]:
    """Cells of ``of`` by their names: those in ``quick`` run always, the others nightly.

    Several arguments of a cell are a tuple.
    """
    assert set(quick) <= set(of), f"no such cells: {sorted(set(quick) - set(of))}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=name,
            marks=[] if name in quick else [pytest.mark.nightly],
        )
        for name, value in of.items()
    ]


def mark_others_nightly(cells: Sequence[pytest.Item]) -> None:
    """Mark nightly those cells of one test that neither of its marks chooses.

    ``@pytest.mark.quick(*patterns)`` chooses cells whose id matches a pattern, with ``*`` for any text;
    ``@pytest.mark.pairwise`` those that ``pairwise_cells`` chooses of its parametrizations' product.
    """
    if not cells:
        return
    quick, pairwise = map(cells[0].get_closest_marker, ("quick", "pairwise"))
    if quick is None and pairwise is None:
        return
    patterns = quick.args if quick is not None else ()
    ids = [cell.name.partition("[")[2].removesuffix("]") for cell in cells]
    unknown = [p for p in patterns if not any(fnmatchcase(name, p) for name in ids)]
    assert not unknown, f"{cells[0].nodeid} has no such cells: {unknown}"
    chosen = {i for i, name in enumerate(ids) if any(fnmatchcase(name, p) for p in patterns)}
    if pairwise is not None:
        chosen |= pairwise_cells(list(map(_values, cells)), chosen)
    for i, cell in enumerate(cells):
        if i not in chosen:
            cell.add_marker(pytest.mark.nightly)


def pairwise_cells(cells: Sequence[tuple[str, ...]], chosen: set[int]) -> set[int]:
    """Positions of few cells which, with those that are chosen, hold whatever pair of values any cell holds.

    With two parametrizations that would be their product: each value is held once then.

    Args:
        cells: the values of each cell.
        chosen: positions of cells that run anyway.
    """
    dimensions = len(cells[0])
    size = 2 if dimensions > 2 else 1

    def held(cell: tuple[str, ...]) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(cell), size))

    missing = set().union(*map(held, cells)) - set().union(*(held(cells[i]) for i in chosen))
    more: set[int] = set()
    while missing:
        best = max(range(len(cells)), key=lambda i: (len(missing & held(cells[i])), -i))
        more.add(best)
        missing -= held(cells[best])
    return more


def _values(cell: pytest.Item) -> tuple[str, ...]:
    assert isinstance(cell, pytest.Function)
    return tuple(map(repr, cell.callspec.params.values()))
