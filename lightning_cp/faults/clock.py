"""Time as it passes for a process: a job that is suspended (Ctrl-Z, ``scontrol suspend``) has not waited."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST = 2.0
"""Seconds between two looks, where they are meant to be half a second apart, that need an explanation."""


class Clock:
    """Seconds, but for those in which this process did not run at all.

    A process that was stopped finds out when it goes on, as hardly any of its own time has passed since the
    last look. One that was busy instead, and only this thread had to wait for its turn, has waited.

    Args:
        seconds: of the machine.
        busy: of the processors that this process has used.
    """

    def __init__(
        self,
        seconds: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.process_time,
    ) -> None:
        self._seconds, self._busy = seconds, busy
        self._looked, self._used = seconds(), busy()
        self._stood = 0.0

    def now(self) -> float:
        """For differences only; to be looked at often, by one thread."""
        seconds, used = self._seconds(), self._busy()
        gap = seconds - self._looked
        if gap > LONGEST and used - self._used < gap / 2:
            self._stood += gap
        self._looked, self._used = seconds, used
        return seconds - self._stood
