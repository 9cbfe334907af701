"""What a stopped process takes for time that has passed."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cp.watchdog.thread import Clock


@dataclass
class Machine:
    """Whose time is made up."""

    seconds: float = 100.0
    busy: float = 3.0

    def passes(self, seconds: float, busy: float) -> None:
        self.seconds += seconds
        self.busy += busy


def test_time_passes_but_for_stops() -> None:
    machine = Machine()
    clock = Clock(lambda: machine.seconds, lambda: machine.busy)
    began = clock.now()
    machine.passes(0.5, 0.01)
    assert clock.now() - began == 0.5
    machine.passes(600.0, 0.01)  # Ctrl-Z, and fg
    assert clock.now() - began == 0.5
    machine.passes(0.5, 0.01)
    assert clock.now() - began == 1.0


def test_a_busy_process_has_waited() -> None:
    """Native code that does not give the interpreter back."""
    machine = Machine()
    clock = Clock(lambda: machine.seconds, lambda: machine.busy)
    began = clock.now()
    machine.passes(30.0, 29.0)
    assert clock.now() - began == 30.0
