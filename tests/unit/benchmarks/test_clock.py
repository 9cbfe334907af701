"""What counts as the time of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import flash_standin as cpu_flash
from lightning_cp.bench import timers as clock


class Hands:
    """Every clock of the process, moved on by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        names = ("process_time", "perf_counter", "thread_time")
        monkeypatch.setattr(
            clock, "time", SimpleNamespace(**dict.fromkeys(names, lambda: self.now))
        )

    def copy_(self, seconds: float) -> None:
        """In the place of a buffer's: takes so long."""
        self.now += seconds


def test_a_stand_in_s_copies_are_taken_off_wherever_it_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hands = Hands(monkeypatch)

    def step() -> None:
        hands.now += 5.0
        buffers: Any = [hands, hands]
        cpu_flash.copy(buffers, [2.0, 4.0])  # type: ignore[list-item]

    samples = clock.measure(step, repeats=2, warm_up=1)
    assert samples.cpu == samples.wall == [5.0, 5.0]


def test_what_computing_takes() -> None:
    """On CPU of the mean rank, whatever the wall says; elsewhere until the last one is done."""
    ranks = [clock.Samples([1.0, 2.0], [9.0, 8.0]), clock.Samples([3.0, 1.0], [5.0, 9.0])]
    assert clock.device_seconds(ranks, "cpu").best == 1.5
    assert clock.device_seconds(ranks, "cuda").best == 9.0
