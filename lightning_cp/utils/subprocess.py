"""A program in a new process, and the end of everything that it started.

Lightning starts the other ranks of a program by running it again, which leaves traces: environment variables
that a later run would take for its own, a process group that cannot be resized, ranks that wait for a dead
one. So each job of a sweep is a separate program in a separate session. This file imports neither torch nor
lightning.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_cp.error_display import RANKS_HERE
from lightning_cp.errors import ConfigError
from lightning_cp.utils.signals import signal_handler

STALE = (
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    RANKS_HERE,
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that identify a rank; a job that inherits them would act as a rank of another run."""
GRACE = 10.0
"""Seconds for an interrupted job to end; Lightning ends its ranks in that time."""


def this_program() -> list[str]:
    """Return the command that runs the same program as this process, without arguments.

    Raises:
        ConfigError: the program is neither a file nor a module, so it cannot be run again.
    """
    spec = sys.modules["__main__"].__spec__
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    if not Path(sys.argv[0]).is_file():
        raise ConfigError(
            f"every job runs the program again, but {sys.argv[0]!r} is not a file. Put the "
            "program into a file or a module: python train.py -m ..., or python -m package.train -m ..."
        )
    return [sys.executable, str(Path(sys.argv[0]).absolute())]


def take_processes(launcher: Any) -> list[subprocess.Popen[bytes]]:
    """Return the processes that Lightning's launcher started by running the program again.

    They leave its list, and with it the supervision of its observer, which kills everything once one of them
    has ended. Workers that were spawned or forked stay in the list.
    """
    processes: list[Any] = getattr(launcher, "procs", [])
    if not all(isinstance(process, subprocess.Popen) for process in processes):
        return []
    taken = processes.copy()
    processes.clear()
    return taken


def run_job(
    command: Sequence[str],
    variables: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> int:
    """Run a command to its end; Ctrl-C, SIGTERM and SIGHUP end it and all its descendants.

    Args:
        command: the program and its arguments.
        variables: added to the environment, from which ``STALE`` is dropped.
        output: a file for the command's output; by default it shares this process's output.

    Returns:
        The exit status; below 0 if a signal ended it, as in ``subprocess``.
    """
    environment = {key: value for key, value in os.environ.items() if key not in STALE}
    with _signals_raise(), _sink(output) as sink:
        process = subprocess.Popen(  # noqa: S603 - the command is ours or the user's own
            command,
            env={**environment, **(variables or {})},
            stdout=sink,
            stderr=subprocess.STDOUT if sink else None,
            start_new_session=True,
        )
        try:
            status = process.wait()
        except BaseException:
            _end(process)
            raise
        if status:
            _signal_all(process, signal.SIGKILL)  # ranks that wait for the failed one
        return status


def check_no_outer_launcher() -> None:
    """Check that this process, which starts the jobs, is not one of several copies.

    Raises:
        ConfigError: torchrun started this process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "a sweep under torchrun would start every job once per rank. Start it without torchrun: each "
            "job is a separate program that starts its own ranks."
        )


def describe_status(status: int) -> str:
    """Describe an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


class _Stop(BaseException):
    """A signal that asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Delay signals that would end this process until its job has ended.

    A job in a separate session receives no signal when the terminal closes; this process does.
    """
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    stopped = None
    with signal_handler(_stop, *numbers):
        try:
            yield
        except _Stop as stop:
            stopped = stop.number
    if stopped is not None:
        signal.raise_signal(stopped)
        raise SystemExit(128 + stopped)  # the program's own handler did not end it


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stop(number)


@contextmanager
def _sink(output: Path | None) -> Iterator[int | None]:
    if output is None:
        yield None
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        yield file.fileno()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a job and its ranks as Ctrl-C would; kill them after ``GRACE`` seconds."""
    _signal_all(process, signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also after a second Ctrl-C
        _signal_all(process, signal.SIGKILL)
        process.wait()


def _signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a job and all of its descendants that are still in its session's first group."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # macOS raises the latter for zombies
        return
