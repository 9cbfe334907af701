"""The end of the main job after an error: one rank shows it, status 1, and no process is left behind.

Lightning starts the other ranks, and ends the whole job with SIGKILL when it sees that one of them failed. So
the first process takes them over, and ends them after the error is shown.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_cp import error_display as console


@contextmanager
def one_report() -> Iterator[list[Any]]:
    """Show an error once and exit with status 1.

    Yields:
        A list for the Trainer, whose processes are ended after an error.
    """
    trainers: list[Any] = []
    try:
        yield trainers
    except Exception as error:
        others = _take_processes(trainers)
        console.show(console.error_of(error) or error)
        _end(others)
        raise SystemExit(1) from None


def _take_processes(trainers: list[Any]) -> list[subprocess.Popen[bytes]]:
    """Return the processes of Lightning's launchers, and remove them from its supervision."""
    taken: list[subprocess.Popen[bytes]] = []
    for trainer in trainers:
        processes = getattr(trainer.strategy.launcher, "procs", [])
        taken += [process for process in processes if isinstance(process, subprocess.Popen)]
        processes.clear()
    return taken


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill processes: they failed too, or wait in a collective, where they handle no other signal."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
