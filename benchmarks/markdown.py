"""Markdown tables that are printed line by line, as results arrive."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_cp.utils.console import markdown_row


def markdown_head(columns: Iterable[str]) -> str:
    """Return the two lines that open a table."""
    names = list(columns)
    return f"{markdown_row(names)}\n|{'---|' * len(names)}"
