"""Ranks that were started again: they meet each other, and nobody who is dead."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_cp.launch.ranks import name_of_attempt

SOON = timedelta(seconds=20)


def attempt(store: dist.Store, ranks: list[int], world_size: int = 3) -> list[str]:
    with ThreadPoolExecutor(world_size) as threads:
        found = [threads.submit(name_of_attempt, store, rank, world_size, SOON) for rank in ranks]
        return [one.result() for one in found]


def test_every_attempt_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    names = [attempt(store, order) for order in ([0, 1, 2], [0, 2, 1], [2, 1, 0])]
    assert [len(set(of_ranks)) for of_ranks in names] == [1, 1, 1]
    assert len({of_ranks[0] for of_ranks in names}) == 3


def test_questions_of_the_dead_do_not_count() -> None:
    """A rank that had asked, and was killed: rank 0 waits for the one that lives."""
    store = dist.HashStore()
    store.set_timeout(SOON)
    store.set("lightning_cp/attempt/asks/1", "somebody dead")
    first, second = attempt(store, [0, 1], 2)
    assert first == second


def test_rank_0_does_not_wait_forever() -> None:
    store = dist.HashStore()
    store.set("lightning_cp/attempt/asks/1", "somebody dead")
    with pytest.raises(dist.DistStoreError, match=r"ranks \[1\] have not come"):
        name_of_attempt(store, 0, 2, timedelta(seconds=0.2))
