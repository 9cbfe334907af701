"""The end of a rank once another has failed: it says so last, and is gone, wherever its main thread is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from lightning_cp.console import Meeting
from lightning_cp.faults.notes import Verdict

FOLDER = "LIGHTNING_CP_VERDICTS"
"""Names the folder where the process that has started workers looks for what they say."""

SPEAKING = 1.0
"""Seconds that a rank waits for another one that shows the verdict: launchers end all when one has ended."""

before_end: list[Callable[[], None]] = []
"""What a process has to do even if it ends like this: nothing else of its ending is done."""


def end(verdict: Verdict) -> NoReturn:
    """Say who failed, and end this process with status 1, also where it waits in a collective for ever.

    Args:
        verdict: without a line where another rank writes it to the same place.
    """
    details = verdict.details.rstrip() + "\n" if verdict.stands else ""
    say = partial(os.write, 2, _encoded(f"\n{details}{verdict.line}\n"))
    if verdict.is_shown and FOLDER not in os.environ and (meeting := Meeting.here()) is not None:
        say = partial(meeting.give_way, verdict.line)
    acts = [partial(tell_parent, verdict), sys.stdout.flush, say, *before_end]
    if not verdict.line:
        acts = [sys.stdout.flush, partial(time.sleep, SPEAKING), *before_end]
    elif verdict.stands and FOLDER in os.environ:
        acts.remove(say)  # the process that has started this one shows it
    try:
        for act in acts:
            with suppress(BaseException):  # whatever it is: this process ends
                act()
    finally:
        os._exit(1)


def output() -> str:
    """The file that standard error is, as the machine numbers it; nothing if it is closed."""
    try:
        found = os.fstat(2)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def tell_parent(verdict: Verdict) -> None:
    """Leave a note for the process that has started this one, if it waits for one."""
    if folder := os.environ.get(FOLDER):
        place = Path(folder) / f"{os.getpid()}"
        with suppress(OSError):
            part = place.with_suffix(".part")
            part.write_bytes(_encoded(f"{verdict.line}\n{verdict.details}"))
            part.rename(place)


def _encoded(text: str) -> bytes:
    """Whatever the locale, and whatever a name of a file has brought into an error."""
    return text.encode(errors="backslashreplace")
