"""What attention must not depend on: the time it runs, the other rows, the order of documents."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_cp.layout import Documents, SequenceLayout
from tests.helpers import oracle
from tests.helpers.attention.distributed import Shards, attend_all, attend_shards, joined, mesh_of
from tests.helpers.attention.problems import (
    BATCH,
    EVERY,
    GRIDS,
    HEADS,
    Grid,
    Problem,
    Tensors,
    expected,
    rarely,
)
from tests.helpers.pool import run_ranks

KERNELS = ["reference", "aten"]


@pytest.mark.quick("*-aten")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("grid", rarely(*GRIDS))
def test_the_same_call_twice_gives_the_same_bits(grid: Grid, kernel: str) -> None:
    """Out, lse and every gradient, on groups made anew, whatever order messages arrive in."""
    last = list(HEADS[grid.ulysses].values())[-1]
    problems = [Problem(last, "rows", dtype=torch.float32), Problem(last, dtype=torch.bfloat16)]
    if kernel == "reference":
        problems.append(Problem(last, "rows", dtype=torch.float32, **EVERY))
    once, again = (run_ranks(grid.world_size, attend_all, problems, grid, kernel) for _ in "12")
    for one, other in zip(once, again, strict=True):
        for shards, repeated in zip(one, other, strict=True):
            assert shards.same_bits(repeated)


FOUR = [grid for grid in GRIDS if grid.world_size in (3, 4)]


def attend_beside(rank: int, world_size: int, problem: Problem, grid: Grid) -> list[Shards]:
    """This rank's results as they are, and with everything in the last row changed."""
    tensors = problem.tensors()
    with mesh_of(grid) as mesh:
        found = [attend_shards(problem, grid, mesh, "reference", tensors)]
        for x in tensors:
            x[-1] = 3.0 - 2.0 * x[-1]
        return [*found, attend_shards(problem, grid, mesh, "reference", tensors)]


@pytest.mark.quick("*-rows")
@pytest.mark.parametrize("sequences", ["dense", "rows"])
@pytest.mark.parametrize("grid", FOUR, ids=str)
def test_a_row_does_not_depend_on_another(grid: Grid, sequences: str) -> None:
    problem = Problem(HEADS[grid.ulysses]["gqa"], sequences)
    for before, after in run_ranks(grid.world_size, attend_beside, problem, grid):
        for one, other in zip(before[:5], after[:5], strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one[:-1], other[:-1])
            assert not torch.equal(one[-1:], other[-1:])


LENGTHS = (1, 13, 16, 1, 22)
ORDER = (3, 4, 0, 2, 1)


def packed_layout(grid: Grid, lengths: tuple[int, ...], problem: Problem) -> SequenceLayout:
    """A row of documents of these lengths."""
    documents = Documents.from_cu_seqlens(np.cumsum([0, *lengths]))
    sizes = (sum(lengths), grid.ring, grid.ulysses)
    return SequenceLayout(*sizes, grid.kind, documents, problem.spec.mask, grid.chunks)


def permutation() -> torch.Tensor:
    """Where each token of the permuted row comes from."""
    spans = [torch.arange(*span) for span in pairwise(np.cumsum([0, *LENGTHS]).tolist())]
    return torch.cat([spans[index] for index in ORDER])


def attend_permuted(rank: int, world_size: int, problem: Problem, grid: Grid) -> Shards:
    """This rank's results with the documents in another order."""
    q, k, v, dout = (x[:, permutation()] for x in problem.tensors())
    tensors: Tensors = (q, k, v, dout)
    layout = packed_layout(grid, tuple(LENGTHS[index] for index in ORDER), problem)
    with mesh_of(grid) as mesh:
        return attend_shards(problem, grid, mesh, "reference", tensors, layout=layout)


@pytest.mark.quick("*-causal")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("grid", FOUR, ids=str)
def test_permuted_documents_have_permuted_results(grid: Grid, causal: bool) -> None:
    """The original order's are the dense answer's: documents fall on other ranks and the same is seen."""
    problem = Problem(HEADS[grid.ulysses]["gqa"], "packed", causal)
    assert problem.shape.documents is not None
    assert [end - start for start, end in problem.shape.documents[0]] == list(LENGTHS)
    shards = run_ranks(grid.world_size, attend_permuted, problem, grid)
    layout = packed_layout(grid, tuple(LENGTHS[index] for index in ORDER), problem)
    got = joined(problem, grid, shards, layout)
    order = permutation()
    for name, want in expected(problem).items():
        dim = 2 if name == "lse" else 1
        permuted = want.index_select(dim, order)
        assert oracle.max_error(getattr(got, name), permuted) <= 1e-11, name
        assert oracle.max_error(getattr(got, name), want) > 1e-3, "the order shows"
    assert got.out.shape[0] == BATCH
