"""Tables of rows that were not measured: what stands where, and what is not said."""

from __future__ import annotations

from lightning_cp.bench.links import LinkRow
from lightning_cp.bench.tables import link_tables

KIB = 1 << 10


def cells(table: str) -> list[dict[str, str]]:
    """Of each line, the cell of each column."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_a_link_stands_under_the_size_that_was_asked_for() -> None:
    """Three others of whole tokens get 66,048 bytes where 64 KiB were asked for."""
    sizes = [(0, 768), (64 * KIB, 66_048), (1024 * KIB, 1_049_088)]
    three = [LinkRow("ring", "all-gather", 1, 4, *size, 1e-3, 5.0, 0.0) for size in sizes]
    one = [LinkRow("ring", "p2p", 1, 4, asked, asked or 256, 1e-3, 6.0, 0.0) for asked, _ in sizes]
    for row, rate in zip(cells(link_tables([*three, *one])), ("5.00", "6.00"), strict=True):
        assert list(row)[3:-1] == ["64 KiB", "1 MiB"]
        assert (row["64 KiB"], row["1 MiB"]) == (rate, rate)
