"""Nothing flows where the mask says no: bit for bit, in float64.

One token's key and value change; results that must not see it must not change in a single bit.
Padding holds NaN, and must neither show nor get a gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.attention.distributed import Shards, attend_shards, joined, mesh_of
from tests.helpers.attention.problems import BATCH, EVERY, HEADS, SEQUENCES, Grid, Problem, gather
from tests.helpers.pool import run_ranks

GRIDS = [
    Grid(1, 2),
    Grid(2),
    Grid(2, exchange=gather("fused", "fused", 2)),
    Grid(4),
    Grid(4, exchange=gather("two_kernel", "fused")),
    Grid(4, kind="contiguous", exchange=gather("two_kernel", "two_kernel")),
    Grid(3, kind="contiguous"),
    Grid(2, 2),
    Grid(2, 2, exchange=gather("two_kernel", "two_kernel")),
    Grid(2, 2, kind="balanced", chunks=3),
]
MORE = [
    Grid(1, 4),
    Grid(4, kind="balanced", chunks=4),
    Grid(4, exchange=gather("fused", "two_kernel", None)),
    Grid(4, exchange=gather("fused", "fused")),
    Grid(2, 2, exchange=gather("fused", "fused", None)),
    Grid(4, 2),
]
EVERY_GRID = [*GRIDS, *(pytest.param(grid, marks=pytest.mark.nightly) for grid in MORE)]
KERNELS = ["reference", "aten"]
TOKENS = [0, 13, 14, 29, 30, 33, 52]
"""Tokens that are changed: first, last and middle ones of their documents."""


def attend_changed(
    rank: int, world_size: int, problem: Problem, grid: Grid, kernel: str
) -> list[Shards]:
    """This rank's results, first as they are, then with one token of row 0 changed at a time."""
    q, k, v, dout = problem.tensors()
    with mesh_of(grid) as mesh:
        found = [attend_shards(problem, grid, mesh, kernel)]
        for token in TOKENS:
            keys, values = k.clone(), v.clone()
            keys[0, token] += 1.0
            values[0, token] -= 100.0
            found.append(attend_shards(problem, grid, mesh, kernel, (q, keys, values, dout)))
        return found


def changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """bool [B, S]: tokens of [B, S, H, D] that differ in any bit."""
    return (before != after).flatten(2).any(-1)


def check_reach(
    token: int, problem: Problem, before: oracle.Attention, after: oracle.Attention
) -> None:
    """Only queries that see the token change, and only keys that those queries see."""
    sequences = SEQUENCES[problem.sequences]
    visible = oracle.visible_pairs(
        sequences.length, causal=problem.causal, documents=sequences.documents
    ).expand(BATCH, -1, -1)
    queries = torch.zeros(BATCH, sequences.length, dtype=torch.bool)
    queries[0] = visible[0, :, token]
    keys = (visible & queries.unsqueeze(2)).any(1)
    assert torch.equal(changed(before.out, after.out), queries)
    assert torch.equal((before.lse != after.lse).any(1), queries)
    reach = {"dq": queries, "dk": keys, "dv": keys}
    for name, reached in reach.items():
        differ = changed(getattr(before, name), getattr(after, name))
        assert not (differ & ~reached).any(), name
        if keys.sum() > 1:  # a token alone in its document has weight 1, whatever its key
            assert differ.any(), name


@pytest.mark.pairwise
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("sequences", ["dense", "packed", "rows"])
@pytest.mark.parametrize("grid", EVERY_GRID, ids=str)
def test_a_token_reaches_only_those_that_may_see_it(
    grid: Grid, sequences: str, causal: bool, kernel: str
) -> None:
    problem = Problem(HEADS[grid.ulysses]["gqa"], sequences, causal)
    ranks = run_ranks(grid.world_size, attend_changed, problem, grid, kernel)
    before, *rest = (joined(problem, grid, shards) for shards in zip(*ranks, strict=True))
    for token, after in zip(TOKENS, rest, strict=True):
        check_reach(token, problem, before, after)


def attend_poisoned(
    rank: int, world_size: int, problem: Problem, grid: Grid, kernel: str
) -> tuple[Shards, Shards]:
    """This rank's results with zeros and with NaN wherever there is no token."""
    sequences = SEQUENCES[problem.sequences]
    tensors = problem.tensors()
    for row, intervals in enumerate(sequences.documents or ()):
        padding = torch.ones(sequences.length, dtype=torch.bool)
        for start, end in intervals:
            padding[start:end] = False
        for x in tensors:
            x[row, padding] = torch.nan
    with mesh_of(grid) as mesh:
        plain = attend_shards(problem, grid, mesh, kernel)
        return plain, attend_shards(problem, grid, mesh, kernel, tensors, pad_value=torch.nan)


@pytest.mark.quick(
    "*-rows-torch.bfloat16-aten",
    "*-dense-torch.float64-reference",
    "ring 2 zigzag-rows-torch.float64-aten",
)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sequences", ["dense", "rows"])
@pytest.mark.parametrize("grid", [*EVERY_GRID, Grid(8)], ids=str)
def test_padding_neither_shows_nor_gets_a_gradient(
    grid: Grid, sequences: str, dtype: torch.dtype, kernel: str
) -> None:
    scores: dict[str, Any] = EVERY if kernel == "reference" else {"sinks": True}
    problem = Problem(HEADS[grid.ulysses]["gqa"], sequences, dtype=dtype, **scores)
    layout = problem.layout(grid)
    assert layout.padded_len > layout.seq_len
    found = run_ranks(grid.world_size, attend_poisoned, problem, grid, kernel)
    for rank, (plain, poisoned) in enumerate(found):
        assert plain.same_bits(poisoned)
        padding = layout.positions(rank) >= layout.seq_len
        assert (poisoned.lse[:, :, padding] == -torch.inf).all()
        for x in (poisoned.out, poisoned.dq, poisoned.dk, poisoned.dv):
            assert (x[:, padding] == 0).all()
