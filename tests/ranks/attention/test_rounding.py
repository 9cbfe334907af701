"""In bfloat16 errors do not grow with the number of ranks: against float64, 8 ranks and one are alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.attention import report
from tests.helpers.attention.checking import SINGLE, norm_error
from tests.helpers.attention.distributed import answers
from tests.helpers.attention.problems import GRIDS, NARROW, Grid, Problem, expected, rarely

EIGHT = [grid for grid in GRIDS if grid.world_size == 8]
TWO = {grid.mode: grid for grid in GRIDS if grid.world_size == 2 and grid.kind == "zigzag"}
KERNELS = ("reference", "aten")
LIMIT = 1.5
NAMES = ("out", "dq", "dk", "dv")
PROBLEMS = [
    Problem(heads, name, causal, dtype=torch.bfloat16, head_dim=16)
    for heads, name, causal in (
        ((8, 8), "512", True),
        ((8, 2), "512", True),  # 8 Ulysses ranks share K/V heads
        ((8, 1), "512 rows", True),
        ((8, 2), "512 rows", False),
    )
]


def errors(problem: Problem, got: oracle.Attention) -> dict[str, float]:
    """Norm of each result's error over the norm of the result."""
    want = expected(problem)
    return {name: norm_error(getattr(got, name), getattr(want, name)) for name in NAMES}


_measured: dict[tuple[str, str], list[dict[str, float]]] = {}


def measured(grid: Grid, kernel: str) -> list[dict[str, float]]:
    """Of each problem on a grid; measured once."""
    key = str(grid), kernel
    if key not in _measured:
        found = answers(PROBLEMS, grid, kernel)
        _measured[key] = [errors(*pair) for pair in zip(PROBLEMS, found, strict=True)]
    return _measured[key]


@pytest.mark.quick("hybrid 4x2 zigzag-aten")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grid", rarely(*EIGHT))
def test_eight_ranks_round_as_one_does(grid: Grid, kernel: str) -> None:
    eight, one = measured(grid, kernel), measured(SINGLE, kernel)
    worst: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    for problem, many, alone in zip(PROBLEMS, eight, one, strict=True):
        for name in NAMES:
            assert alone[name] > 2**-10, (name, "bfloat16 has more error than that")
            ratio = many[name] / alone[name]
            worst[name] = max(worst[name], ratio)
            assert ratio <= LIMIT, (str(problem), name, many[name], alone[name])
    report.ratios[str(grid), kernel] = worst


@pytest.mark.quick("ring 4 *")
@pytest.mark.parametrize(
    "grid", [Grid(4), Grid(8), Grid(4, kind="contiguous"), Grid(2, 2)], ids=str
)
def test_gradients_travel_rounded(grid: Grid) -> None:
    """Only dk and dv change, by at most one rounding more; float32 gradients stay bit for bit the same."""
    narrow = replace(grid, exchange=NARROW)
    one = replace(PROBLEMS[0], dtype=torch.float32)
    for name in NAMES:
        pair = [getattr(answers([one], each, "aten")[0], name) for each in (grid, narrow)]
        assert torch.equal(*pair), name
    wide, rounded = measured(grid, "reference"), measured(narrow, "reference")
    for exact, less in zip(wide, rounded, strict=True):
        assert all(less[name] == exact[name] for name in ("out", "dq"))
        for name in ("dk", "dv"):  # two roundings of one size add up to sqrt(2) of one
            assert exact[name] < less[name] < 2**0.5 * exact[name], name


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grid", rarely(*(grid for grid in EIGHT if grid.mode in TWO)))
def test_eight_ranks_round_as_two_do(grid: Grid, kernel: str) -> None:
    pairs = zip(measured(grid, kernel), measured(TWO[grid.mode], kernel), strict=True)
    for eight, two in pairs:
        assert all(eight[name] <= LIMIT * two[name] for name in NAMES)
