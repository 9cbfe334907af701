"""Every mode against the dense float64 answer: out, lse, dq, dk and dv of the whole sequence.

Where there are sinks, their gradient too (the sum of the ranks'), and the largest scores where asked for.

A row is a grid of ranks and a kernel; its cells differ in mask, heads, sequences and dtype. No cell
would accept zeros, or ranks that do not communicate.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.helpers.attention.checking import SINGLE, check
from tests.helpers.attention.matrix import matrix, matrix_cells
from tests.helpers.attention.problems import EVERY, GRIDS, HEADS, QUICK, SEQUENCES, Grid, Problem

Change = dict[str, Any]

KERNELS = ("reference", "aten")
MASKS = {"causal": True, "full": False}
WINDOWS = ((9, -1), (5, 12))
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def default_cells(grid: Grid, kernel: str) -> list[Problem]:
    """The grid's part of the matrix; every mask, split of heads and kind of sequence in float64; a few in
    lower precision; and what changes scores.
    """
    heads = HEADS[grid.ulysses]
    sequences = ("dense", "packed", "rows")
    cells = [
        Problem(pair, name, causal)
        for pair, name, causal in product(heads.values(), sequences, MASKS.values())
    ]
    cells.append(Problem(heads["gqa"], "divides"))
    cells.append(Problem(heads["gqa"], "equal_rows", causal=False))
    last = list(heads.values())[-1]
    for dtype in DTYPES[1:]:
        cells.append(Problem(heads["gqa"], "dense", dtype=dtype))
        cells.append(Problem(last, "rows", dtype=dtype))
        cells.append(Problem(last, "packed", causal=False, dtype=dtype))
    # The matrix has float16 on 2 and 4 ranks only.
    cells += [Problem(heads["gqa"], name, dtype=torch.float16) for name in sequences]
    if kernel == "reference":
        cells += [Problem(heads["gqa"], "rows", window=window) for window in WINDOWS]
        cells.append(Problem(last, "dense", causal=False, window=WINDOWS[1]))
    cells += [*scores_cells(grid, kernel), *width_cells(grid, kernel)]
    return list(dict.fromkeys([*matrix_cells(grid, kernel), *cells]))


FEATURES: dict[str, Change] = {
    "softcap": {"softcap": EVERY["softcap"]},
    "alibi": {"alibi": 1},
    "sinks": {"sinks": True},
    "scale": {"scale": EVERY["scale"]},
}


def scores_cells(grid: Grid, kernel: str) -> list[Problem]:
    """Each change of the scores on every kind of sequence; with windows, and all of them together."""
    pairs, last = HEADS[grid.ulysses], list(HEADS[grid.ulysses].values())[-1]
    sequences = ("dense", "packed", "rows")
    if kernel == "aten":
        cells = [Problem(last, name, sinks=True) for name in sequences]
        cells.append(Problem(pairs["gqa"], "rows", causal=False, sinks=True, scale=0.7))
        cells.append(Problem(pairs["gqa"], "short", sinks=True))
        return [*cells, Problem(pairs["gqa"], "dense", sinks=True, dtype=torch.bfloat16)]
    cells = [
        Problem(last, name, **change) for name, change in product(sequences, FEATURES.values())
    ]
    cells += [Problem(pairs["gqa"], "rows", window=(9, -1), **how) for how in FEATURES.values()]
    cells += [Problem(pairs["gqa"], name, causal=False, **EVERY) for name in sequences]
    cells.append(Problem(pairs["mqa"], "dense", False, (5, 12), **EVERY))
    cells.append(Problem(pairs["gqa"], "short", **EVERY))
    for dtype in DTYPES[1:]:
        cells.append(Problem(pairs["gqa"], "rows", dtype=dtype, **EVERY))
    return cells


def width_cells(grid: Grid, kernel: str) -> list[Problem]:
    """Values narrower and wider than keys: every split of heads, kind of sequence, dtype and feature."""
    heads = HEADS[grid.ulysses]
    cells = [
        Problem(pair, name, causal=name != "packed", value_dim=dim)
        for (pair, name), dim in product(
            zip(heads.values(), ("dense", "packed", "rows", "short"), strict=False), (5, 12)
        )
    ]
    cells += [Problem(heads["gqa"], "rows", dtype=dtype, value_dim=4) for dtype in DTYPES[1:]]
    if kernel == "reference":
        cells.append(Problem(heads["gqa"], "rows", window=(9, -1), value_dim=3, **EVERY))
    else:
        cells.append(Problem(heads["mqa"], "rows", sinks=True, value_dim=16))
    return cells


def all_cells(grid: Grid, kernel: str) -> list[Problem]:
    """The cross product."""
    heads = HEADS[grid.ulysses].values()
    windows = ((-1, -1), *WINDOWS) if kernel == "reference" else ((-1, -1),)
    parts = product(heads, SEQUENCES, MASKS.values(), windows, DTYPES)
    return [Problem(*part) for part in parts]


MANY = [grid for grid in GRIDS if grid.world_size > 4]
"""More ranks than a small machine has time for, with the slower kernel."""


BY_BOTH = {str(grid) for grid in GRIDS if grid.world_size < 4} | {
    "ring 4 zigzag",
    "hybrid 2x2 zigzag",
}
"""Where the slower kernel always runs, too."""


@pytest.mark.quick(
    "ulysses 2-reference",
    "ulysses 2-aten",
    "ring 2 zigzag-aten",
    "gather 2 zigzag two_kernel/two_kernel 1-aten",
    "gather 2 zigzag fused/fused 2-aten",
    "ring 3 zigzag-aten",
    "rotation 3 zigzag-aten",
    "hybrid 2x2 zigzag-aten",
)
@pytest.mark.parametrize(
    ("grid", "kernel"),
    [
        pytest.param(
            *(grid, kernel),
            id=f"{grid}-{kernel}",
            marks=[]
            if str(grid) in (QUICK if kernel == "aten" else BY_BOTH)
            else [pytest.mark.nightly],
        )
        for grid in GRIDS
        for kernel in KERNELS
        if kernel == "aten" or grid not in MANY
    ],
)
def test_equals_dense(grid: Grid, kernel: str) -> None:
    check(default_cells(grid, kernel), grid, kernel)


@pytest.mark.quick("ring 8 contiguous", "gather 8 zigzag fused/fused 2")
@pytest.mark.parametrize(
    "grid", [grid for grid in GRIDS if "A4" in matrix(grid, "reference")], ids=str
)
def test_windows_on_eight_ranks(grid: Grid) -> None:
    """What the other kernel leaves of the matrix."""
    exact = matrix(grid, "reference")["A4"]
    check([cell for cell in exact if cell.window != (-1, -1)], grid, "reference")


@pytest.mark.nightly
@pytest.mark.parametrize("grid", MANY, ids=str)
def test_many_ranks_equal_dense(grid: Grid) -> None:
    check(default_cells(grid, "reference"), grid, "reference")


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_dense_in_every_combination(grid: Grid, kernel: str) -> None:
    check(all_cells(grid, kernel), grid, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_rank_equals_dense(kernel: str) -> None:
    check(default_cells(SINGLE, kernel), SINGLE, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grid", [SINGLE, Grid(1, 2), Grid(2, 2)], ids=str)
def test_a_negative_scale(grid: Grid, kernel: str) -> None:
    """Operators that mask before they scale would let the masked keys in, or return NaN."""
    heads = HEADS[grid.ulysses]["gqa"]
    cells = [
        Problem(heads, name, causal, scale=-0.3)
        for name in ("dense", "rows")
        for causal in MASKS.values()
    ]
    check(cells, grid, kernel)
