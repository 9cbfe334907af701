"""Tables of rows that were not measured: what stands where, and what is not said."""

from __future__ import annotations

from dataclasses import replace

from lightning_cp.bench.links import LinkRow
from lightning_cp.bench.methods import AttentionCase, context_parallel_methods
from lightning_cp.bench.modes import ModeRow
from lightning_cp.bench.suites import link_tables, mode_tables

KIB = 1 << 10
MODE = ModeRow("ulysses", 2, 64, 0, "float32", 8, 4, 2, False)


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


def test_tables_of_modes_fit_a_terminal() -> None:
    """With the longest names, of packed documents, and times of a slow machine."""
    ways = [
        way.with_layout_of(AttentionCase(65536, 8, packed=3)).name
        for way in context_parallel_methods(8)
    ]
    slow = dict.fromkeys(("both", "compute", "comm", "exposed", "one", "cpu", "cpu_one"), 1.2345)
    shares = dict.fromkeys(("overlap", "efficiency", "spread", "cpu_spread"), -1.0)
    rows = [replace(MODE, way=way, documents=3, tflops=1e-3, **slow, **shares) for way in ways]
    table = mode_tables(rows)
    assert "| llama3 two/fused, balanced " in table
    assert max(map(len, table.splitlines())) <= 110
