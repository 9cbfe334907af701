"""The first rank's tensors on all ranks, small ones in one message."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_cp.comm import reduce
from lightning_cp.comm.reduce import broadcast_tensors
from tests.helpers.pool import run_ranks

DTYPES = [torch.bool, torch.float64, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def draw(rank: int) -> list[torch.Tensor]:
    """Tensors of many kinds and odd sizes: nothing is aligned by chance."""
    torch.manual_seed(rank)
    drawn = [torch.randint(-9, 9, (3, 5)).to(dtype) for dtype in DTYPES]
    drawn += [
        torch.randn(4, 6).t(),
        torch.randn(()),
        torch.empty(0, 3),
        torch.randn(40),
        torch.randn(7),
    ]
    return [*drawn, torch.randn(2, requires_grad=True)]


def overwritten(rank: int, world: int, message: int) -> tuple[bool, int]:
    group: Any = dist.group.WORLD
    own = draw(rank)
    memory = [x.data_ptr() for x in own]
    with (
        mock.patch.object(reduce, "MESSAGE_BYTES", message),
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as sent,
    ):
        broadcast_tensors(iter(own), group)
    assert memory == [x.data_ptr() for x in own]
    pairs = zip(own, draw(0), strict=True)
    return all(torch.equal(a.double(), b.double()) for a, b in pairs), sent.call_count


def test_values_are_those_of_the_first_rank_in_few_messages() -> None:
    assert run_ranks(3, overwritten, reduce.MESSAGE_BYTES) == [(True, 1)] * 3
    for right, messages in run_ranks(3, overwritten, 128):
        assert right
        assert 3 < messages < len(draw(0))
    for right, messages in run_ranks(3, overwritten, 1):
        assert right
        assert messages == len(draw(0)) - 1  # but for the empty one


def alone(rank: int, world: int) -> bool:
    group: Any = dist.new_group([rank], use_local_synchronization=True)
    with mock.patch.object(dist, "broadcast") as sent:
        broadcast_tensors(draw(rank), group)
    dist.destroy_process_group(group)
    return not sent.called


def test_a_group_of_one_sends_nothing() -> None:
    assert all(run_ranks(2, alone))
