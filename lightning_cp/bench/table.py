"""Markdown tables, a row at a time or whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def head(columns: Iterable[str]) -> str:
    """The two lines that open a table."""
    names = list(columns)
    return f"{row(names)}\n|{'---|' * len(names)}"


def row(cells: Iterable[object]) -> str:
    """One line."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def aligned(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A whole table that reads well as it is: the first column to the left, the others to the right."""
    lines = [list(columns), *([str(cell) for cell in cells] for cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    first, *others = (_padded(cells, widths) for cells in lines)
    return "\n".join([row(first), row(rule), *map(row, others)])


def percent(share: float | None) -> str:
    """As a cell: 12%, or - where nothing is known."""
    return "-" if share is None else f"{share:.0%}"


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    left = cells[0].ljust(widths[0])
    return [left, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
