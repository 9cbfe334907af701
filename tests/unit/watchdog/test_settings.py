"""Limits that cannot be meant, and ranks' names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.validation import check
from lightning_cp.watchdog.phase import Position
from lightning_cp.watchdog.watch import RunWatch, name_of


@pytest.mark.parametrize("name", ["step_timeout", "first_step_timeout"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "10"])
def test_limits_are_seconds(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be a number of seconds above 0"):
        check(StrategyConfig(**{name: value}))


def test_the_first_step_may_take_longer_only() -> None:
    with pytest.raises(ConfigError, match=r"first_step_timeout=60 is shorter than step_timeout=90"):
        check(StrategyConfig(step_timeout=90, first_step_timeout=60))
    check(StrategyConfig(step_timeout=None, first_step_timeout=60))
    check(StrategyConfig(step_timeout=90, first_step_timeout=None))


def test_names_of_ranks() -> None:
    assert name_of(2, 4, StrategyConfig()) == "rank 2 (cp_rank 2 of 4, data_rank 0)"
    assert (
        name_of(2, 4, StrategyConfig(data_parallel_size=2))
        == "rank 2 (cp_rank 0 of 2, data_rank 1)"
    )


@pytest.mark.parametrize("goes_on", [True, False])
def test_processes_are_observed_again_unless_python_ends(
    goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Python ends no thread can be started (3.12), and ranks may end with 143 in any order."""
    observed: list[Any] = []
    main = SimpleNamespace(is_alive=lambda: goes_on)
    monkeypatch.setattr("lightning_cp.watchdog.watch.threading.main_thread", lambda: main)
    monkeypatch.setattr("lightning_cp.watchdog.watch._launch_process_observer", observed.append)
    watch = RunWatch(Position())
    watch._launcher = SimpleNamespace(procs=["a process"])
    watch.stop()
    assert observed == ([["a process"]] if goes_on else [])
