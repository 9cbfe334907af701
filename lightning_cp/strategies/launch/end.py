"""The end of a program whose ranks talk by gloo: its threads come to rest before Python does.

One of them completes a collective, which wakes the main thread, and lets go of the tensors after that. Where
it has no turn before Python takes itself down, on a busy machine, it finds nobody to let go of them, and
aborts the process ("terminate called without an active exception", status 134). Destroying the groups would
not help: they live for as long as some sharded tensor refers to its mesh.
"""

from __future__ import annotations

import time
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

LIMIT = 2.0
"""Seconds in which a thread has a turn."""
PAUSE = 0.005
"""Seconds in which the main thread leaves Python to others."""
THREAD = "pt_gloo_runloop"
"""What PyTorch calls those that complete collectives."""

_registered: list[Finalize] = []


def let_gloo_rest_at_exit() -> None:
    """Once in a process; also where it was forked, so that nothing of ``atexit`` is called."""
    if not _registered:
        _registered.append(Finalize(None, let_gloo_rest, exitpriority=0))


def let_gloo_rest() -> None:
    """Wait until none of gloo's threads has anything to do; where that cannot be seen, for a moment."""
    end = time.monotonic() + LIMIT
    time.sleep(PAUSE)
    while any(state == "R" for state in thread_states(THREAD)) and time.monotonic() < end:
        time.sleep(PAUSE)


def thread_states(name: str) -> list[str]:
    """Of this process's threads of that name, as Linux has them: ``R`` runs or waits for its turn."""
    found = []
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                called, _, rest = (
                    task.joinpath("stat").read_text().partition("(")[2].rpartition(")")
                )
                found += [rest.split()[0]] if called == name else []
    return found
