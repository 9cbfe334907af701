"""A peer that raises is told in its line, on whichever rank it does; the others are measured."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from benchmarks import side_by_side
from benchmarks import side_by_side as rounds
from benchmarks.side_by_side import WayResult, compare
from lightning_cp.bench.methods import Attend, AttentionCase, ContextParallelMethod, Step
from lightning_cp.bench.timers import Samples
from tests.helpers.pool import run_ranks

CASE = AttentionCase(32, 2, 2, 2, 8)


@dataclass(frozen=True)
class Raising:
    """Raises on the last rank, while the first one waits for it."""

    name: str = "raising"

    def obstacle(self, case: AttentionCase) -> str | None:
        return None

    def positions(self, case: AttentionCase, rank: int) -> torch.Tensor:
        return torch.arange(16 * rank, 16 * rank + 16)

    def attention(self, case: AttentionCase) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == case.ranks - 1:
                raise RuntimeError("no such kernel\nand more")
            dist.all_reduce(q.detach())
            return q

        return attend

    def step(self, case: AttentionCase, *, backward: bool = True) -> Step:
        raise NotImplementedError


@dataclass(frozen=True)
class Barred(Raising):
    """Cannot compute the case on one rank."""

    name: str = "barred"

    def obstacle(self, case: AttentionCase) -> str | None:
        return "not here" if dist.get_rank() == 1 else None


@pytest.mark.nightly
def test_a_peer_that_raises_on_one_rank_is_told_and_the_rest_measured() -> None:
    failed, barred, ours = compare(CASE, [Raising(), Barred(), ContextParallelMethod(2, 1)], 1)
    assert failed.obstacle == "rank 1 fails: RuntimeError: no such kernel"
    assert barred.obstacle == "not here"
    assert ours.obstacle is None
    assert ours.error < 1e-5


def test_ranks_are_started_again_without_the_peer_that_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without processes: of those that are asked to measure it, one says who it was, and all end."""
    counts: dict[str, int] = dict.fromkeys(("sent", "control", "kernels", "padding", "peak"), 0)
    found = WayResult(Samples([2.0], [0.0]), counts, 0.0)
    started: list[list[str]] = []

    def on_ranks(
        count: int,
        _: object,
        case: AttentionCase,
        ways: list[Raising],
        repeats: int,
        notes: Path,
        device_type: str,
    ) -> object:
        started.append([way.name for way in ways])
        if Raising() in ways:
            with suppress(RuntimeError), rounds._recording_failure(Raising(), notes):
                raise RuntimeError("no such kernel")
            raise ProcessException("a rank ended", 1, 0)
        return [(Samples([1.0], [0.0]), ["not here", found])] * count

    monkeypatch.setattr(side_by_side, "on_ranks", on_ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    barred, failed, ours = compare(CASE, [Barred(), Raising(), ContextParallelMethod(2, 1)], 1)
    assert started == [["barred", "raising", "ulysses"], ["barred", "ulysses"]]
    assert (barred.way, barred.obstacle) == (Barred(), "not here")
    assert (failed.way.name, failed.obstacle) == (
        "raising",
        "rank 1 fails: RuntimeError: no such kernel",
    )
    assert (ours.obstacle, ours.ratio.best) == (None, 4.0)


def obstacle(rank: int, world_size: int, notes: Path) -> tuple[str | None, str | None]:
    return tuple(
        rounds._obstacle(way, CASE, notes) for way in (Barred(), ContextParallelMethod(2, 1))
    )  # type: ignore[return-value]


def test_what_one_rank_cannot_nobody_begins(tmp_path: Path) -> None:
    assert run_ranks(2, obstacle, tmp_path) == [("not here", None)] * 2


def test_a_failure_of_our_own_is_no_line_of_a_table(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="ours"),
        rounds._recording_failure(ContextParallelMethod(2, 1), tmp_path),
    ):
        raise RuntimeError("ours")
    assert rounds.failed_way(tmp_path) is None


def test_the_first_to_fail_is_blamed(tmp_path: Path) -> None:
    """What another rank says of it later, or of the next way, is due to that."""
    for way, told in ((Raising(), "first\nand more"), (Barred(), "lost")):
        with (
            mock.patch.object(dist, "get_rank", return_value=1),
            pytest.raises(RuntimeError, match=told),
            rounds._recording_failure(way, tmp_path),
        ):
            raise RuntimeError(told)
    assert rounds.failed_way(tmp_path) == ("raising", "rank 1 fails: RuntimeError: first")
