"""What differs less than the repeats do is not shown; of one repeat nothing is known."""

from __future__ import annotations

import pytest

from lightning_cp.bench.suites import _repeats
from lightning_cp.bench.timers import (
    Figure,
    RunSamples,
    Samples,
    largest_spread,
    overlap_figures,
    wall_of_slowest,
)
from tests.helpers.bench.configured import TINY, settings_of

QUIET = {"both": [5.0, 5.1], "compute": [4.0, 4.1], "comm": [3.0, 3.1], "neither": [1.0, 1.1]}


def apart(changes: dict[str, list[float]]) -> dict[str, float | None]:
    """Of one rank with so many seconds in each run."""
    runs = RunSamples(**{name: [Samples(x, x)] for name, x in (QUIET | changes).items()})
    return overlap_figures(wall_of_slowest(runs.both), runs)


def test_of_quiet_runs_all_is_known() -> None:
    found = apart({})
    assert (found["compute"], found["comm"], found["exposed"], found["overlap"]) == (4, 2, 1, 0.5)


@pytest.mark.parametrize("run", list(QUIET))
def test_of_restless_runs_it_is_not(run: str) -> None:
    """The repeats of any of the four differ by more than communication takes."""
    found = apart({run: [QUIET[run][0], QUIET[run][0] + 2.1]})
    assert (found["compute"], found["comm"]) == (4, 2)
    assert (found.get("exposed"), found.get("overlap")) == (None, None)


def test_runs_that_contradict_each_other() -> None:
    """The whole call is not quicker than its compute."""
    found = apart({"both": [3.5, 3.6]})
    assert (found.get("exposed"), found.get("overlap")) == (None, None)
    assert apart({"both": [3.95, 4.0]})["exposed"] == pytest.approx(-0.05)


def test_little_compute_hides_overlap_alone() -> None:
    found = apart({"compute": [0.0625, 0.125], "both": [2.0625, 2.125]})
    assert (found.get("exposed"), found.get("overlap")) == (2, None)


def test_one_repeat() -> None:
    found = apart({name: x[:1] for name, x in QUIET.items()})
    assert (found.get("exposed"), found.get("overlap")) == (None, None)
    assert Figure.of([2.0]) == Figure(2.0, None, 2.0)
    assert Figure.of([2.0, 3.0, 2.5]) == Figure(2.0, 0.5, 2.5)
    assert largest_spread([0.1, 0.3]) == 0.3
    assert largest_spread([0.1, None]) is None
    assert "One repeat gives no spread" in _repeats(settings_of(*TINY, "repeats=1"))
    assert "one repeat" not in _repeats(settings_of(*TINY))
