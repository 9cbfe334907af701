"""What a run borrows of its process is given back when it ends: hooks, handlers, places in registries."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_cp import error_display, fabric
from lightning_cp.config import StrategyConfig
from lightning_cp.strategies import base as processes
from lightning_cp.watchdog.phase import Position
from lightning_cp.watchdog.watch import RunWatch


class Switched(RunWatch):
    """Of a single process."""

    on = False

    @property
    def is_on(self) -> bool:
        return self.on

    def start(self, name: str, address: str) -> None:
        self.on = True

    def stop(self) -> None:
        super().stop()
        self.on = False


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the program's own hook is told of."""
    found: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: found.append(error))
    name = "lightning_cp.watchdog.watch."
    monkeypatch.setattr(f"{name}name_of", lambda *_: "rank 0")
    monkeypatch.setattr(f"{name}dist.get_rank", lambda: 0)
    monkeypatch.setattr(f"{name}dist.get_world_size", lambda: 1)
    return found


@pytest.mark.parametrize("first", [0, 1])
def test_the_program_s_own_hook_is_called_whoever_ends_first(
    first: int, said: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    watches, error = [Switched(Position()), Switched(Position())], ValueError("x")
    monkeypatch.setattr(sys, "__excepthook__", lambda *_: pytest.fail("Python's own"))
    for watch in watches:
        watch.begin(StrategyConfig(), "", None, handles_sigterm=False)
    for watch in (watches[first], watches[1 - first]):
        watch.stop()
    sys.excepthook(ValueError, error, None)
    assert said == [error]


@pytest.fixture
def own_handler() -> Iterator[list[int]]:
    """Signals that reach the program's own handler of SIGTERM."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


@pytest.mark.nightly
def test_a_signal_s_handler_goes_with_its_strategy(own_handler: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        strategy: Any = fabric.UlyssesRingStrategy()
        assert not strategy.should_stop
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)
        assert strategy._vote.wish() > 0
        del strategy
        gc.collect()
        assert signal.getsignal(signal.SIGTERM) is before
    assert len(own_handler) == 2


@pytest.mark.nightly
def test_a_handler_that_came_later_stays(own_handler: list[int]) -> None:
    strategy: Any = fabric.UlyssesRingStrategy()
    assert not strategy.should_stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    del strategy
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_stages_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of ``validate`` in one process."""
    monkeypatch.setattr(processes, "check_same_start", lambda *_: None)
    strategy: Any = fabric.UlyssesRingStrategy()
    strategy.cluster_environment = _Environment()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy._launcher = None
    monkeypatch.setattr(strategy.runtime.watch, "begin", lambda *_, **__: None)
    monkeypatch.setattr(error_display, "_place", None)
    registry: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    strategy._begin_watch(strategy.precision)
    before = len(registry)
    for _ in range(3):
        strategy._begin_watch(strategy.precision)
    assert len(registry) == before


class _Environment:
    main_address = "127.0.0.1"

    def global_rank(self) -> int:
        return 0

    def local_rank(self) -> int:
        return 0

    def world_size(self) -> int:
        return 1


def test_a_watch_may_be_stopped_by_its_own_thread() -> None:
    """Garbage is collected by whoever comes to it."""
    watch, raised = RunWatch(Position()), list[BaseException]()

    def run() -> None:
        try:
            watch.stop()
        except BaseException as error:
            raised.append(error)

    thread: Any = threading.Thread(target=run)
    thread.leave = lambda: None
    watch._watcher = thread
    thread.start()
    thread.join()
    assert not raised
