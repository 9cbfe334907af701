"""Console output: plain and Markdown tables, short names for many layers, and a quiet Lightning."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

Place = tuple[str, ...]
"""A dotted name, split at its dots."""


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with left-aligned columns and a rule under its head."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])


def split_name(name: str) -> Place:
    """Split a dotted name at its dots."""
    return tuple(name.split("."))


def without_layer_numbers(place: Place) -> Place:
    """Replace numbers by ``*``, so that all layers have the same name."""
    return tuple("*" if part.isdigit() else part for part in place)


def common_name(places: Sequence[Place]) -> str:
    """Return one name for all, empty for a root; parts that differ become ``*``."""
    together = (set(parts) for parts in zip(*places, strict=True))
    return ".".join(parts.pop() if len(parts) == 1 else "*" for parts in together)


LOGGERS = (
    "lightning.pytorch",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Show only warnings of Lightning inside the block."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def markdown_row(cells: Iterable[object]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a whole Markdown table with aligned columns: the first to the left, the others to the right."""
    lines = [list(columns), *([str(cell) for cell in cells] for cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    first, *others = (_padded(cells, widths) for cells in lines)
    return "\n".join([markdown_row(first), markdown_row(rule), *map(markdown_row, others)])


def percent(share: float | None) -> str:
    """Format a share as 12%, or - if it is unknown."""
    return "-" if share is None else f"{share:.0%}"


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    left = cells[0].ljust(widths[0])
    return [left, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
