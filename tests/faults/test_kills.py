"""A rank that is killed: every process is gone within 10 seconds, and the others say last who it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.run import run_fault

BOUND = 10.0


def killed(folder: Path, way: str, ranks: int, rank: int, where: str, *more: str) -> None:
    done = run_fault(folder, way, ranks, "kill", rank, where, *more, ranks=ranks)
    assert done.seconds < BOUND
    data = 2 if "data_parallel_size=2" in more else 1
    cp = ranks // data
    name = f"rank {rank} (cp_rank {rank % cp} of {cp}, data_rank {rank // cp})"
    assert done.last == f"{name} lost at step 3, in {where}"
    assert done.statuses[rank] == -9
    assert [status for at, status in enumerate(done.statuses) if at != rank] == [1] * (ranks - 1)
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("way", "rank", "where"),
    [("trainer", 2, "backward"), ("fabric", 0, "optimizer"), ("trainer", 3, "forward")],
)
def test_a_kill(tmp_path: Path, way: str, rank: int, where: str) -> None:
    killed(tmp_path, way, 4, rank, where, "data_parallel_size=2")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["trainer", "fabric"])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_every_kill(tmp_path: Path, way: str, rank: int, where: str) -> None:
    killed(tmp_path, way, 3, rank, where)
