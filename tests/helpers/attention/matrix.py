"""The matrix that every mode must pass, by rows; what else is tested is a row of its own.

A1: float64 on 2 and 4 ranks. A2: float32. A3: bfloat16 and float16, causal. A4: float64 on 8 ranks, causal.
"""

from __future__ import annotations

from itertools import product

import torch

from tests.helpers.attention.problems import GRIDS, Grid, Problem

HEADS = ((4, 4), (4, 2), (4, 1))
WIDE_HEADS = ((8, 8), (8, 2), (8, 1))
"""Where 4 heads do not split."""

PLAIN: tuple[tuple[str, bool, tuple[int, int]], ...] = tuple(
    (name, causal, (-1, -1)) for name, causal in product(("dense", "packed", "rows"), (True, False))
)
WINDOWED: tuple[tuple[str, bool, tuple[int, int]], ...] = tuple(
    (name, causal, (37, -1) if causal else (37, 37))
    for name, causal in product(("dense", "long", "rows"), (True, False))
)
"""Wider than a shard, and narrower than some document of each kind of sequence."""

ASIDE = frozenset(
    str(grid)
    for grid in GRIDS
    if grid.exchange.forward != grid.exchange.backward
    or (grid.kind == "contiguous" and (grid.exchange.name == "all_gather" or grid.ulysses > 1))
)
"""Grids that differ from others in what few cells show: these have the other cells only."""


def matrix(grid: Grid, kernel: str) -> dict[str, list[Problem]]:
    """Row -> cells of it that a grid has; CPU's flash operator has no windows."""
    if grid.world_size not in (2, 4, 8) or str(grid) in ASIDE:
        return {}
    heads = HEADS if 4 % grid.ulysses == 0 else WIDE_HEADS
    shapes = PLAIN if kernel == "aten" else (*PLAIN, *WINDOWED)
    exact = [Problem(pair, *shape) for pair, shape in product(heads, shapes)]
    if grid.world_size == 8:
        return {"A4": [cell for cell in exact if cell.causal]}
    half = product(heads, ("dense", "packed", "rows"), (torch.bfloat16, torch.float16))
    rows = {"A1": exact, "A3": [Problem(pair, name, dtype=dtype) for pair, name, dtype in half]}
    if kernel == "reference":
        single = torch.float32
        rows["A2"] = [Problem(pair, *shape, single) for pair, shape in product(heads, shapes)]
    return rows


def matrix_cells(grid: Grid, kernel: str) -> list[Problem]:
    """All of them."""
    return [cell for cells in matrix(grid, kernel).values() for cell in cells]


def row_of(cell: Problem, grid: Grid) -> str:
    """The row that a cell counts for."""
    for row, cells in matrix(grid, "reference").items():
        if cell in cells:
            return row
    return "beyond"
