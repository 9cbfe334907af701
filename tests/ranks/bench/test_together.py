"""What fails on one rank, while the others may wait for it."""

from __future__ import annotations

import torch.distributed as dist

from lightning_cp.bench import timers as together
from tests.helpers.pool import run_ranks


def attempt_of(rank: int) -> str:
    """Fails on the last of three ranks; what comes of it on this one."""

    def attempt() -> None:
        if rank == 2:
            raise RuntimeError("no kernel\nand more")

    return str(together.failure_of_any(attempt))


def one_fails(rank: int, world_size: int) -> str:
    return attempt_of(rank)


def the_others_do_not_come_back(rank: int, world_size: int) -> str:
    together.PATIENCE = 0.1
    try:
        told = attempt_of(rank) if rank == 2 else ""
    except RuntimeError as error:
        told = f"raised {error}"
    finally:
        together.PATIENCE = 60.0
        if rank != 2:
            together.next_attempt_name()  # as if it had begun, and never come back
    dist.barrier()
    return told


def test_what_fails_on_one_rank_is_told_on_all() -> None:
    assert run_ranks(3, one_fails) == ["fails: RuntimeError: no kernel"] * 3


def test_a_rank_does_not_wait_for_those_that_wait_for_it() -> None:
    assert run_ranks(3, the_others_do_not_come_back) == ["", "", "raised no kernel\nand more"]
