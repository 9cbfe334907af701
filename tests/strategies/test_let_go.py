"""A run that is over leaves nothing: its strategy, its model and its groups go when nobody refers to them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from lightning_cp import UlyssesRingStrategy
from lightning_cp.mesh import ContextParallelMesh
from tests.pool import run_ranks
from tests.strategies.runs import Run, execute


def leftovers(rank: int, world_size: int, strategy: Any) -> list[int]:
    """What two runs add: strategies, meshes and threads of groups."""
    execute(rank, world_size, Run(strategy=strategy, steps=1, predict=False))
    before = _count()
    for _ in range(2):
        execute(rank, world_size, Run(strategy=strategy, steps=1, predict=False))
    return [after - at_first for after, at_first in zip(_count(), before, strict=True)]


def _count() -> list[int]:
    gc.collect()
    alive = gc.get_objects()
    counts = [
        sum(type(x) is kind for x in alive) for kind in (UlyssesRingStrategy, ContextParallelMesh)
    ]
    return [*counts, len(list(Path("/proc/self/task").iterdir()))]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_trainer_s_strategy_goes_with_it(engine: str) -> None:
    strategy = (("ring_size", 2), ("data_parallel", engine))
    assert run_ranks(2, leftovers, strategy, timeout=120) == [[0, 0, 0]] * 2
