"""Running a program in which something goes wrong, until every process of it is gone."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch.start import _run, environment, free_port, torchrun_variables
from tests.helpers.pool.master import PRELOAD

SCRIPT = Path(__file__).parent / "script.py"
FIRED = re.compile(r"FAULT FIRED (?P<kind>\S+) (?P<pid>\d+) (?P<time>[\d.]+)")
MARK = "FAULTS_MARK"
LAUNCHED = 0
"""One process is started, as a user would, and it starts the others."""
LIMIT = 150.0
"""Seconds for a whole run on a busy machine; the fault's own bound counts from when it fires."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    seconds: float
    """From the fault until the last process was gone."""
    last: str
    """The last line of all that was printed; of a survivor, where each rank has an output of its own."""
    statuses: tuple[int, ...]
    """Exit codes of the processes that were started; negative: the signal that ended it."""
    outputs: tuple[str, ...]
    """What each of them printed, with those that it started."""
    saved: tuple[str, ...] = ()
    """Checkpoints that it left, whole or not."""

    @property
    def output(self) -> str:
        """All of it."""
        return "\n".join(self.outputs)


def run_fault(
    folder: Path, *arguments: object, ranks: int = LAUNCHED, limit: float = LIMIT, **variables: str
) -> Outcome:
    """Run ``script.py`` and see how it ends.

    Args:
        folder: working directory.
        arguments: of the script.
        ranks: so many processes are started, each told its rank as torchrun would; or ``LAUNCHED``.
        limit: seconds after which everything is killed, and this fails.
        variables: of the environment.
    """
    told = torchrun_variables(ranks) if ranks else [{}]
    return run_processes(folder, told, (SCRIPT, *arguments), limit=limit, **variables)


def run_torchrun(
    folder: Path, ranks: int, *arguments: object, limit: float = LIMIT, **variables: str
) -> Outcome:
    """Run ``script.py`` by torchrun's own agent."""
    options = (f"--nproc-per-node={ranks}", f"--master-port={free_port()}")
    command = ("-m", "torch.distributed.run", *options, SCRIPT, *arguments)
    return run_processes(folder, [{}], command, limit=limit, **variables)


def run_processes(
    folder: Path,
    told: Sequence[Mapping[str, str]],
    command: Sequence[object],
    *,
    limit: float = LIMIT,
    **variables: str,
) -> Outcome:
    """Run ``python <command>`` once for each environment; see ``run_fault``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    mark = uuid.uuid4().hex
    outputs = [folder / f"output{index}.txt" for index in range(len(told))]
    processes = [
        context.Process(
            target=_run,
            args=(
                list(map(str, command)),
                folder,
                environment(**{**own, **variables, MARK: mark}),
                output,
            ),
        )
        for own, output in zip(told, outputs, strict=True)
    ]
    for process in processes:
        process.start()
    sessions = {process.pid or 0 for process in processes}
    end = time.monotonic() + limit
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        while living(sessions, mark) and time.monotonic() < end:
            time.sleep(0.05)
        gone, left = time.time(), living(sessions, mark)
    finally:
        for session in sessions:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(session, signal.SIGKILL)
    texts = tuple(output.read_text() if output.exists() else "" for output in outputs)
    assert not left, f"processes are left: {left}\n" + "\n".join(texts)[-6000:]
    fired = FIRED.search("\n".join(texts))
    assert fired is not None, "the fault did not fire:\n" + "\n".join(texts)[-6000:]
    statuses = tuple(process.exitcode or 0 for process in processes)
    saved = tuple(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt*"))
    return Outcome(gone - float(fired["time"]), _last(texts), statuses, texts, saved)


def living(sessions: set[int], mark: str) -> list[int]:
    """Processes of these sessions, or with this mark, that are neither gone nor waiting to be noticed."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = place.read_text().rpartition(")")[2].split()[:4]
            marked = f"{MARK}={mark}".encode() in (place.parent / "environ").read_bytes()
        except (OSError, ValueError):
            continue
        if (marked or int(session) in sessions) and state != "Z":
            found.append(int(place.parent.name))
    return found


def _last(texts: Sequence[str]) -> str:
    """Of the ranks without the fault, if there are several outputs: all must say the same."""
    without = [text for text in texts if not FIRED.search(text)] or texts
    lines = {(text.rstrip().splitlines() or [""])[-1] for text in without}
    return " | ".join(sorted(lines))
