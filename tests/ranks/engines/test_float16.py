"""Gradients in float16: the mean of large ones exists, although their sum over ranks does not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.comm.reduce import prescale
from lightning_cp.engines.ddp_comm_hook import CommHook
from lightning_cp.engines.gradients import average_present
from tests.helpers.pool import run_ranks

LARGE, SMALL = 60_000.0, 2.0**-16
"""Near the ends of float16: it ends at 65,504, and at 2**-14 without loss of digits."""


def averaged(rank: int, world_size: int, by: str) -> torch.Tensor:
    """Gradients of a weight for each of three inputs, that of the last one on rank 0 only."""
    world = dist.group.WORLD
    assert world is not None
    model = nn.Linear(3, 1, bias=False, dtype=torch.float16)
    x = torch.tensor([[LARGE, SMALL, 3.0 * (rank == 0)]], dtype=torch.float16)
    if by == "ddp":
        wrapped = DistributedDataParallel(model, process_group=world)
        CommHook().register(wrapped, world)
        wrapped(x).sum().backward()
    else:
        model(x).sum().backward()
        average_present(list(model.parameters()), world, world)
    assert model.weight.grad is not None
    return model.weight.grad[0]


@pytest.mark.parametrize("by", ["ddp", "average_present"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_large_gradients_do_not_overflow(ranks: int, by: str) -> None:
    want = torch.tensor([LARGE, SMALL, 3.0 / ranks], dtype=torch.float16)
    for got in run_ranks(ranks, averaged, by):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=0.0)
        assert ranks == 3 or bool((got == want).all())


def test_other_dtypes_are_divided_once_after_the_sum() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(3, dtype=dtype)
        assert prescale(x, 3) == 3
        assert bool((x == 1).all())
