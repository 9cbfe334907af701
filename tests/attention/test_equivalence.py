"""Every mode against the dense float64 answer: out, lse, dq, dk and dv of the whole sequence.

Where there are sinks, their gradient too (the sum of the ranks'), and the largest scores where asked for.

A row is a grid of ranks and a kernel; its cells differ in mask, heads, sequences and dtype. No cell
would accept zeros, or ranks that do not communicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from tests import oracle
from tests.attention import report
from tests.attention.distributed import answers
from tests.attention.problems import EVERY, GRIDS, HEADS, SEQUENCES, Grid, Problem, expected, voids

Change = dict[str, Any]

KERNELS = ("reference", "aten")
MASKS = {"causal": True, "full": False}
WINDOWS = ((9, -1), (5, 12))
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SINGLE = Grid()


def default_cells(grid: Grid, kernel: str) -> list[Problem]:
    """Every mask, split of heads and kind of sequence in float64; a few in lower precision."""
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
    if kernel == "reference":
        cells += [Problem(heads["gqa"], "rows", window=window) for window in WINDOWS]
        cells.append(Problem(last, "dense", causal=False, window=WINDOWS[1]))
    return cells + scores_cells(grid, kernel)


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


def all_cells(grid: Grid, kernel: str) -> list[Problem]:
    """The cross product."""
    heads = HEADS[grid.ulysses].values()
    windows = ((-1, -1), *WINDOWS) if kernel == "reference" else ((-1, -1),)
    parts = product(heads, SEQUENCES, MASKS.values(), windows, DTYPES)
    return [Problem(*part) for part in parts]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_dense(grid: Grid, kernel: str) -> None:
    check(default_cells(grid, kernel), grid, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_dense_in_every_combination(grid: Grid, kernel: str) -> None:
    check(all_cells(grid, kernel), grid, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_rank_equals_dense(kernel: str) -> None:
    check(default_cells(SINGLE, kernel), SINGLE, kernel)


def check(cells: list[Problem], grid: Grid, kernel: str) -> None:
    """Run the cells on the grid; fail with all that are beyond their limits."""
    alone = one_rank(cells, kernel)
    allowed = {cell: limits(cell, alone.get(cell)) for cell in cells}
    failures: list[str] = []
    for cell, answer in zip(cells, answers(cells, grid, kernel), strict=True):
        check_dtypes(cell, answer)
        error, want = measure(cell), expected(cell)
        found = {name: error(got, getattr(want, name)) for name, got in answer.items()}
        shown = {name: found[name] for name in found if name != "max_logits"}  # always float32
        report.lines[str(grid), kernel].add(cell.dtype, shown, allowed[cell])
        # `not <=` so that NaN fails too.
        worse = {name: found[name] for name in found if not found[name] <= allowed[cell][name]}
        if worse:
            failures.append(f"{cell}: {worse}, allowed {allowed[cell]}")
    assert not failures, f"{len(failures)} of {len(cells)} cells:\n" + "\n".join(failures)
    for cell in cells:
        oracle.assert_not_vacuous(expected(cell), voids(cell, grid), allowed[cell], measure(cell))


def measure(cell: Problem) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """How far off a result is: where it is worst, or in norm for bfloat16."""
    return norm_error if cell.dtype == torch.bfloat16 else oracle.max_error


def one_rank(cells: list[Problem], kernel: str) -> dict[Problem, oracle.Attention]:
    """What one rank makes of the cells whose limits depend on it."""
    rounded = [cell for cell in cells if cell.dtype != torch.float64]
    new = [cell for cell in rounded if (kernel, cell) not in _one_rank]
    for cell, answer in zip(new, answers(new, SINGLE, kernel) if new else [], strict=True):
        _one_rank[kernel, cell] = answer
    return {cell: _one_rank[kernel, cell] for cell in rounded}


_one_rank: dict[tuple[str, Problem], oracle.Attention] = {}


def limits(cell: Problem, alone: oracle.Attention | None) -> dict[str, float]:
    """The largest error that each result may have.

    float64: 1e-11 (1e-6 for the largest scores, which are float32 always). float32: twice what one rank
    gets, and 1e-6. bfloat16: twice (out, and lse and largest scores, which are float32) or three times
    (gradients) what one rank gets, in norm.
    """
    want = dict(expected(cell).items())
    if alone is None:
        return {name: 1e-6 if name == "max_logits" else 1e-11 for name in want}
    if cell.dtype == torch.float32:
        return {n: 2 * oracle.max_error(got, want[n]) + 1e-6 for n, got in alone.items()}
    gradients = {"dq", "dk", "dv", "dsinks"}
    return {
        n: (3 if n in gradients else 2) * norm_error(got, want[n]) + EXTRA.get(n, 0.0)
        for n, got in alone.items()
    }


EXTRA = {"lse": 1e-6, "max_logits": 1e-6, "dsinks": 2**-8}
"""What results in float32 may have beside; the sinks' gradient is rounded on each rank, then summed."""


def norm_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinities must be equal."""
    actual, expected = actual.double(), expected.double()
    same = actual == expected
    difference = (actual - expected).masked_fill(same, 0.0).norm()
    scale = expected.masked_fill(expected.isinf(), 0.0).norm()
    return (difference / scale).nan_to_num(nan=math.inf).item()


def check_dtypes(cell: Problem, answer: oracle.Attention) -> None:
    """Results have the dtype of the inputs, the lse that of the sums."""
    wide = torch.float64 if cell.dtype == torch.float64 else torch.float32
    for name, got in answer.items():
        want = {"lse": wide, "max_logits": torch.float32}.get(name, cell.dtype)
        assert got.dtype == want, (str(cell), name, got.dtype)
