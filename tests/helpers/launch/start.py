"""Starting scripts as a user, torchrun or SLURM would, and what they must come to.

Importing torch and lightning takes seconds, and a test that starts three programs would do nothing else. So
there are two ways: ``program`` starts a real one, ``ranks`` forks it from a process that has imported them
already, once per rank, as a cluster would start it. Nothing but loopback is used.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_cp.watchdog.watch import SWITCH
from tests.helpers.installed import ROOT
from tests.helpers.pool.master import PRELOAD

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 240.0
"""Seconds that a group of processes may take on a busy machine."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
STALE = (
    SWITCH,
    "MASTER_ADDR",
    "MASTER_PORT",
    "PL_GLOBAL_SEED",
    "TORCHELASTIC_RUN_ID",
    *RANK_VARIABLES,
)


def environment(**more: str) -> dict[str, str]:
    """What a user's shell has: one thread, loopback, and no rank."""
    kept = {key: value for key, value in os.environ.items() if key not in STALE}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "PYTHONPATH": path}
    return {**kept, **ours, **more}


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


@dataclass(frozen=True)
class Done:
    """A process that has ended."""

    status: int
    output: str
    errors: str = ""
    """What went to stderr, where that was to be kept apart."""


@contextmanager
def program(cwd: Path, *command: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """``python <command>`` in a session of its own, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish(process: subprocess.Popen[str]) -> str:
    """What a program that must succeed has printed."""
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output[-6000:]
    return output


def ranks(
    cwd: Path, variables: Sequence[Mapping[str, str]], *command: object, apart: bool = False
) -> list[Done]:
    """Run a script in one process for each environment, all at once, until all have ended.

    Args:
        cwd: their working directory.
        variables: what each of them is told, such as its rank.
        command: what follows ``python``: a script, ``-m`` and a module, or ``-c`` and code; its arguments.
        apart: keep stdout and stderr apart.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    outputs = [cwd / f"output{index}.txt" for index in range(len(variables))]
    errors = [cwd / f"errors{index}.txt" if apart else None for index in range(len(variables))]
    processes = [
        context.Process(
            target=_run, args=(list(map(str, command)), cwd, environment(**own), *files)
        )
        for own, *files in zip(variables, outputs, errors, strict=True)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hanging = [process for process in processes if process.exitcode is None]
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    texts = [
        [file.read_text() if file and file.exists() else "" for file in files]
        for files in zip(outputs, errors, strict=True)
    ]
    assert not hanging, "\n".join(text for both in texts for text in both)[-6000:]
    return [
        Done(process.exitcode or 0, *text) for process, text in zip(processes, texts, strict=True)
    ]


def torchrun_variables(count: int, nodes: int = 1) -> list[dict[str, str]]:
    """What torchrun tells each of its processes, in rank order."""
    here = count // nodes
    shared = {
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(here),
    }
    return [
        {
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % here),
            "GROUP_RANK": str(rank // here),
        }
        for rank in range(count)
    ]


def _run(
    command: list[str], cwd: Path, own: dict[str, str], output: Path, errors: Path | None = None
) -> None:
    """Be a fresh interpreter that runs a script, with a session and an output of its own."""
    os.setsid()
    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(output, written), 1)
    os.dup2(os.open(errors, written) if errors else 1, 2)
    os.environ.clear()
    os.environ.update(own)
    os.chdir(cwd)
    torch.set_num_threads(1)

    from lightning_cp._autoload import autoload

    autoload()  # the entry point, as torch would have called it
    try:
        _main(command)
    except Exception as error:  # multiprocessing would show it in its own way
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _main(command: list[str]) -> None:
    if command[0] == "-c":
        sys.argv = ["-c"]
        exec(command[1], {"__name__": "__main__"})
    elif command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def all_succeeded(done: list[Done]) -> list[Done]:
    """Those of which every one must."""
    for one in done:
        assert one.status == 0, one.output[-6000:]
    return done
