"""Every mode over our Triton kernels, in Triton's interpreter on every rank.

Limits go by what others get wrong of the same cell on one rank: in float32 the reference kernel, in
half precision, where weights are rounded before they meet the values, PyTorch's flash operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_cp.attention.api import context_parallel_attention
from lightning_cp.attention.checkpointing import keep_attention
from lightning_cp.kernels.triton.launch import TritonFA2, is_installed, is_interpreted
from tests.helpers.attention.checking import check
from tests.helpers.attention.distributed import Shards, attend_shards, mesh_of
from tests.helpers.attention.problems import EVERY, Grid, Problem, gather
from tests.helpers.pool import run_ranks

pytestmark = pytest.mark.skipif(
    not (is_installed() and is_interpreted()),
    reason="needs Triton and TRITON_INTERPRET=1, which tests/conftest.py sets without CUDA",
)


def cell(heads: tuple[int, int], sequences: str, **how: Any) -> Problem:
    """A problem that the kernel takes."""
    return Problem(heads, sequences, **{"dtype": torch.float32, "head_dim": 32, **how})


RING = Grid(2)
DENSE = cell((2, 1), "dense")  # tiles of neighbouring chunks become one
SCORES = cell((2, 1), "packed", **EVERY)  # ALiBi keeps them apart
WINDOW = cell((2, 1), "long", window=(9, -1))
EVERYTHING = cell((2, 1), "rows", causal=False, window=(9, 4), **EVERY)

CELLS: dict[Grid, list[Problem]] = {
    RING: [DENSE, SCORES, WINDOW, EVERYTHING],
    Grid(2, kind="balanced", chunks=5): [cell((2, 1), "packed"), SCORES],
    Grid(2, exchange=gather("two_kernel", "two_kernel")): [DENSE, SCORES],
    Grid(2, exchange=gather("fused", "fused")): [DENSE, SCORES],
    Grid(1, 2): [DENSE, cell((4, 2), "rows", **EVERY)],  # the first: both ranks have its K/V head
    Grid(2, 2): [DENSE, SCORES],
}


@pytest.mark.quick("ring 2 zigzag")
@pytest.mark.parametrize("grid", CELLS, ids=str)
def test_equals_dense(grid: Grid) -> None:
    check(CELLS[grid], grid, "triton", judge="reference")


@pytest.mark.nightly
def test_half_precision() -> None:
    """float16 alone: the interpreter's bfloat16 is wrong."""
    cells = [cell((2, 1), "packed", dtype=torch.float16, sinks=True)]
    check(cells, RING, "triton", judge="aten")


def attend_and_keep(*qkv: torch.Tensor, **how: Any) -> Any:
    """One call as a checkpointed block, which keeps its results."""
    return checkpoint(
        context_parallel_attention, *qkv, **how, use_reentrant=False, context_fn=keep_attention
    )


def count_forwards(
    rank: int, world_size: int, problem: Problem, attend: Callable[..., Any]
) -> tuple[Shards, int]:
    """This rank's results, and how often the kernel went forward for them."""
    forward = mock.patch.object(TritonFA2, "forward", autospec=True, side_effect=TritonFA2.forward)
    with mesh_of(RING) as mesh, forward as calls:
        return attend_shards(problem, RING, mesh, "triton", attend=attend), calls.call_count


@pytest.mark.nightly
def test_a_checkpointed_block_gives_the_same_bits_and_goes_forward_once() -> None:
    """``test_equals_dense`` has the same cell: these are the bits of the dense answer."""
    assert EVERYTHING in CELLS[RING]
    plain, kept = (
        run_ranks(2, count_forwards, EVERYTHING, attend, timeout=240)
        for attend in (context_parallel_attention, attend_and_keep)
    )
    for (shards, calls), (other, again) in zip(plain, kept, strict=True):
        assert shards.same_bits(other)
        assert calls == again > 0
