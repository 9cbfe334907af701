"""Tables for people, and one name for many that differ in a layer's number only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Place = tuple[str, ...]
"""A dotted name, at its dots."""


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns side by side, all to the left, under a rule."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([padded[0], "  ".join("-" * width for width in widths), *padded[1:]])


def place_of(name: str) -> Place:
    """A dotted name at its dots."""
    return tuple(name.split("."))


def without_numbers(place: Place) -> Place:
    """The same for all layers."""
    return tuple("*" if part.isdigit() else part for part in place)


def shown_together(places: Sequence[Place]) -> str:
    """One name for all, empty for that of a root: a number stays if it is the same in all of them."""
    together = (set(parts) for parts in zip(*places, strict=True))
    return ".".join(parts.pop() if len(parts) == 1 else "*" for parts in together)
