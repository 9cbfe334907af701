"""Judging cells: what a grid of ranks makes of problems, against the dense float64 answer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.helpers import oracle
from tests.helpers.attention import report
from tests.helpers.attention.distributed import answers
from tests.helpers.attention.matrix import row_of
from tests.helpers.attention.problems import Grid, Problem, expected, voids

SINGLE = Grid()
HALF = (torch.bfloat16, torch.float16)


def check(cells: list[Problem], grid: Grid, kernel: str, judge: str | None = None) -> None:
    """Run the cells on the grid; fail with all that are beyond their limits.

    Args:
        cells: the problems.
        grid: the ranks.
        kernel: what computes them there.
        judge: the kernel whose error on one rank is the measure; ``kernel`` itself by default.
    """
    alone = one_rank(cells, judge or kernel)
    allowed = {cell: limits(cell, alone.get(cell)) for cell in cells}
    failures: list[str] = []
    for cell, answer in zip(cells, answers(cells, grid, kernel), strict=True):
        check_dtypes(cell, answer)
        error, want = measure(cell), expected(cell)
        found = {name: error(got, getattr(want, name)) for name, got in answer.items()}
        shown = {name: found[name] for name in found if name != "max_logits"}  # always float32
        report.lines[str(grid), kernel].add(cell.dtype, shown, allowed[cell])
        report.rows[row_of(cell, grid)].add(cell.dtype, shown, allowed[cell])
        # `not <=` so that NaN fails too.
        worse = {name: found[name] for name in found if not found[name] <= allowed[cell][name]}
        if worse:
            failures.append(f"{cell}: {worse}, allowed {allowed[cell]}")
    assert not failures, f"{len(failures)} of {len(cells)} cells:\n" + "\n".join(failures)
    for cell in cells:
        oracle.assert_not_vacuous(expected(cell), voids(cell, grid), allowed[cell], measure(cell))


def measure(cell: Problem) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """How far off a result is: where it is worst, or in norm in half precision."""
    return norm_error if cell.dtype in HALF else oracle.max_error


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
    gets, and 1e-6. Half precision: twice (out, and lse and largest scores, which are float32) or three times
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
