"""Markdown tables, a row at a time."""

from __future__ import annotations

from collections.abc import Iterable


def head(columns: Iterable[str]) -> str:
    """The two lines that open a table."""
    names = list(columns)
    return f"{row(names)}\n|{'---|' * len(names)}"


def row(cells: Iterable[object]) -> str:
    """One line."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"
