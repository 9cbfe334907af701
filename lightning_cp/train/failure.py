"""One report of a failure, whichever rank has it, and no process left behind.

Every rank is a process that writes to the same terminal, so an error that all of them raise would be shown
once per rank. The process that the user started makes a folder and names it in the environment that the
others inherit; whoever fails first with some error leaves a mark there and prints it, and who finds the
mark is silent. A ``RankFailure`` only repeats another rank's error, so it is printed only if that rank's own
report is nowhere to be found (it is on another machine's terminal).

The others are started by Lightning, which ends the whole job with SIGKILL when it sees that one of them has
failed. So a rank that has reported waits to be ended by the first process, which then exits with status 1;
unless the ranks watch each other (see :mod:`lightning_cp.faults`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lightning_cp.errors import LightningCPError, RankFailure
from lightning_cp.faults.ending import before_end

FOLDER = "LIGHTNING_CP_FAILURES"
"""Names the folder with the marks; set in all ranks but the one that the user started."""
PATIENCE = 10.0
"""Seconds that ranks give each other to fail as well: teardown on a busy machine."""


@contextmanager
def one_report() -> Iterator[list[Any]]:
    """Report an error once and exit with status 1.

    Yields:
        A list to put the Trainer into once there is one: its processes are ended after an error.
    """
    first = FOLDER not in os.environ
    trainers: list[Any] = []
    with _folder() if first else nullcontext():
        try:
            yield trainers
        except Exception as error:
            others = _take_processes(trainers)
            marks = Path(os.environ[FOLDER])
            _report(_own(error), marks, first)
            if first:
                _within_patience(lambda: _all_printed(marks))
                _end(others)
            elif not _others_know(trainers):
                time.sleep(PATIENCE)
            raise SystemExit(1) from None


@contextmanager
def _folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as made:
        os.environ[FOLDER] = made
        clean = partial(shutil.rmtree, made)
        before_end.append(clean)
        try:
            yield
        finally:
            before_end.remove(clean)
            del os.environ[FOLDER]


def _own(error: BaseException) -> BaseException:
    """This package's error, where Hydra has wrapped it in one of its own."""
    cause = error.__cause__
    return cause if isinstance(cause, LightningCPError) else error


def _report(error: BaseException, marks: Path, first: bool) -> None:
    repeats = isinstance(error, RankFailure)
    if repeats and (not first or _within_patience(lambda: any(marks.glob("*")))):
        return
    line = f"{type(error).__name__}: {error}"
    text = _text(error, line, consequence=any(marks.glob("*")))
    mark = marks / hashlib.sha256(line.encode()).hexdigest()
    try:
        mark.touch(exist_ok=False)
    except OSError:  # it exists, or the first process has gone and taken the folder with it
        return
    print(f"\n{text.rstrip()}", file=sys.stderr, flush=True)  # in one piece, after a progress bar
    mark.write_text("printed")


def _text(error: BaseException, line: str, *, consequence: bool) -> str:
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return "".join(traceback.format_exception(error))
    if isinstance(error, LightningCPError):
        return f"{line}\n(HYDRA_FULL_ERROR=1 shows where it was raised.)"
    if consequence:
        return f"Rank {os.environ.get('LOCAL_RANK', 0)} failed after that: {line}"
    return "".join(traceback.format_exception(error))


def _within_patience(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _all_printed(marks: Path) -> bool:
    """Whether nobody who has left a mark is still printing."""
    return all(mark.stat().st_size for mark in marks.glob("*"))


def _others_know(trainers: list[Any]) -> bool:
    """Whether the ranks watch each other, so that none of them is ended before its time."""
    cores = [getattr(trainer.strategy, "_core", None) for trainer in trainers]
    return any(core is not None and core.watch.failed for core in cores)


def _take_processes(trainers: list[Any]) -> list[subprocess.Popen[bytes]]:
    """The processes that Lightning's launchers have started, taken from its supervision."""
    taken: list[subprocess.Popen[bytes]] = []
    for trainer in trainers:
        processes = getattr(trainer.strategy.launcher, "procs", [])
        taken += [process for process in processes if isinstance(process, subprocess.Popen)]
        processes.clear()
    return taken


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End them now: they have failed too, or wait in a collective, where no other signal is heard."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
