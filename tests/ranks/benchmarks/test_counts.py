"""What a rank sends, and whether it is data or an agreement."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.op_counts import Counts
from lightning_cp.comm.all_gather import start_all_gather
from lightning_cp.comm.consensus import check_equal
from tests.helpers.pool import run_ranks

RANKS = 3
AGREED = 16
GATHERED = 5 * 4


def counted(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Bytes of data and of agreements, in an agreement and in each collective on five numbers."""
    group = dist.group.WORLD
    assert group is not None
    x, whole = torch.randn(5), torch.empty(5 * world_size)
    lists = list(whole.split(5))
    calls = [
        lambda: check_equal({"tokens": 3}, group, what="call"),
        lambda: dist.all_gather(lists, x),
        lambda: dist.all_gather([torch.empty(5).long() for _ in lists], x.long()),
        lambda: start_all_gather(x, group).wait(),
        lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        lambda: dist.all_reduce(torch.empty(3 * world_size)),
    ]
    found: list[tuple[int, int]] = []
    for call in calls:
        with Counts() as counts:
            call()
        found.append((counts.data, counts.control))
    return found


def test_numbers_are_data_and_integers_agreements() -> None:
    others = RANKS - 1
    for found in run_ranks(RANKS, counted):
        agreed, gathered, integers, as_one, traded, summed = found
        assert agreed == (0, 2 * AGREED * others // RANKS)  # a sum
        assert gathered == as_one == traded == (GATHERED * others, 0)
        assert integers == (0, 2 * GATHERED * others)
        assert summed == (2 * 3 * 4 * others, 0)
