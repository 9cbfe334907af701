"""Sums of gradients: what they hold in the end, whatever their memory held before."""

from __future__ import annotations

import weakref

import pytest
import torch

from lightning_cp.kernels.aten import AtenCpuFlash
from lightning_cp.kernels.flash_attn import FlashAttn2
from lightning_cp.kernels.merge import Accumulator, GradientSum, GradientSums
from lightning_cp.kernels.protocol import QKV, Kernel, Output, Scores
from lightning_cp.kernels.reference import ReferenceKernel
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile
from tests.helpers.kernels.dense import SCALE, Problem
from tests.helpers.kernels.flash_attn_standin import installed

SHAPE = (2, 6, 3, 4)
WHOLE = (ALL_ROWS, 0, 6)
PARTS = {
    "whole": [WHOLE],
    "whole twice": [WHOLE, WHOLE],
    "a half, then the whole": [(ALL_ROWS, 3, 3), WHOLE],
    "rows": [(0, 0, 6), (1, 2, 3)],
    "nothing": [],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("memory", ["its own", "empty", "filled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_the_parts(
    parts: list[tuple[int, int, int]], memory: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    filled = memory == "filled"
    before = torch.randn(SHAPE) if filled else torch.full(SHAPE, torch.nan)
    wanted = before.clone() if filled else torch.zeros(SHAPE)
    into = None if memory == "its own" else before.clone()
    gradient = GradientSum(before, torch.float32, into=into, empty=not filled)
    for row, start, length in parts:
        rows = slice(None) if row == ALL_ROWS else slice(row, row + 1)
        part = torch.randn(wanted[rows, :length].shape).to(dtype)
        wanted[rows, start : start + length] += part
        gradient.add(row, start, part)
    assert torch.equal(gradient.result.float(), wanted)
    assert torch.equal(gradient.total, wanted)
    assert gradient.total.dtype == torch.float32
    assert into is None or gradient.total is into


def test_the_only_part_is_kept_as_it_came() -> None:
    part = torch.ones(SHAPE, dtype=torch.bfloat16)
    gradient = GradientSum(part, torch.float32)
    gradient.add(*WHOLE[:2], part)
    assert gradient.result is part


def test_one_row_of_two_does_not_cover_both() -> None:
    """A part of one row has the shape of one row only."""
    gradient = GradientSum(torch.full(SHAPE, torch.nan), torch.float32)
    gradient.add(1, 0, torch.ones(1, 6, 3, 4))
    assert torch.equal(gradient.total, torch.stack([torch.zeros(6, 3, 4), torch.ones(6, 3, 4)]))


def test_buffers_that_hold_something_are_added_to() -> None:
    buffers = [torch.full(SHAPE, float(at)) for at in range(3)]
    sums = GradientSums.of(*buffers)
    for gradient in sums:
        gradient.add(*WHOLE[:2], torch.ones(SHAPE))
    assert [float(x.mean()) for x in sums.totals] == [1.0, 2.0, 3.0]
    assert all(total is buffer for total, buffer in zip(sums.totals, buffers, strict=True))


def test_a_first_part_is_written_and_the_rest_is_zero() -> None:
    """Nothing is read: the memory of an empty sum may hold NaN."""
    memory = torch.full(SHAPE, torch.nan)
    gradient = GradientSum(memory, torch.float32, into=memory)
    assert gradient.is_empty
    gradient.begin(1, 2, 4)[1, 2:4] = 1.0
    assert not gradient.is_empty
    wanted = torch.zeros(SHAPE)
    wanted[1, 2:4] = 1.0
    assert gradient.total is memory
    assert torch.equal(memory, wanted)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_placed_in_memory_that_is_made_when_it_is_needed(
    parts: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    """Not for a part that covers all and is alone; never twice."""
    torch.manual_seed(0)
    wanted = torch.zeros(SHAPE)
    made: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        made[:] = made or [torch.full(SHAPE, torch.nan)]
        return made[0]

    gradient = GradientSum(torch.empty(SHAPE), torch.float32, later=make)
    for row, start, length in parts:
        rows = slice(None) if row == ALL_ROWS else slice(row, row + 1)
        part = torch.randn(wanted[rows, :length].shape).to(dtype)
        wanted[rows, start : start + length] += part
        gradient.add(row, start, part)
    assert not made or parts[0] != WHOLE
    gradient.place()
    assert gradient.total is made[0]
    assert torch.equal(made[0], wanted)


def test_what_a_sum_was_made_like_is_given_up() -> None:
    """Keys are freed once there are gradients of them."""
    keys = torch.ones(SHAPE)
    alive = weakref.ref(keys)
    gradient = GradientSum(keys, torch.float32)
    gradient.add(*WHOLE[:2], torch.ones(SHAPE, dtype=torch.bfloat16))
    del keys
    assert alive() is None
    first = weakref.ref(gradient.result)
    gradient.widen()
    assert first() is None
    assert gradient.result.dtype == torch.float32


@pytest.mark.parametrize(
    "kernel", [ReferenceKernel(), AtenCpuFlash(), FlashAttn2()], ids=lambda kernel: kernel.name
)
def test_gradients_of_a_whole_tile_are_the_callers_to_change(kernel: Kernel) -> None:
    """They may become the sums, which others are added to: nothing else may lie in their memory."""
    q, k, v, dout = Problem(Mask(), dtype=torch.float32).tensors()
    inputs, tiles = QKV(q, k, v), [Tile(ALL_ROWS, 0, 53, 0, 53, 0, "causal")]
    scores, state = Scores(SCALE, Mask()), Accumulator(q, torch.float32)
    with installed("2.8.3"):
        kernel.forward(inputs, tiles, scores, state)
        merged = Output(dout, *state.result(q.dtype))
        sums = GradientSums.like(inputs, torch.float32)
        kernel.backward(merged, inputs, tiles, scores, sums)
    gradients = [gradient.result for gradient in sums]
    before = [x.clone() for x in (*gradients, *inputs, *merged)]
    for at, gradient in enumerate(gradients):
        gradient.fill_(torch.nan)
        others = [*gradients, *inputs, *merged]
        changed = [n for n, x in enumerate(others) if not torch.equal(x, before[n])]
        assert changed == [at]
        gradient.copy_(before[at])
