"""How a rank ends once another one has failed: it says so last, and is gone, wherever its main thread is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from lightning_cp.faults.notes import Verdict

FOLDER = "LIGHTNING_CP_VERDICTS"
"""Names the folder where the process that has started workers looks for what they say."""

before_end: list[Callable[[], None]] = []
"""What a process has to do even if it ends like this: nothing else of its ending is done."""


def end(verdict: Verdict) -> NoReturn:
    """Say who failed, and end this process with status 1, also where it waits in a collective for ever."""
    tell_parent(verdict)
    for act in list(before_end):
        with suppress(Exception):
            act()
    with suppress(Exception):
        sys.stdout.flush()
    details = verdict.details.rstrip() + "\n" if verdict.kind == "stuck" else ""
    with suppress(OSError):
        os.write(2, f"\n{details}{verdict.line}\n".encode())
    os._exit(1)


def tell_parent(verdict: Verdict) -> None:
    """Leave a note for the process that has started this one, if it waits for one."""
    if folder := os.environ.get(FOLDER):
        place = Path(folder) / f"{os.getpid()}"
        with suppress(OSError):
            part = place.with_suffix(".part")
            part.write_text(f"{verdict.line}\n{verdict.details}")
            part.rename(place)
