"""The parent's handle on one rank: asking it, waiting for it, looking into it and ending it."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.helpers.pool import worker as worker_module
from tests.helpers.pool.report import RankReport, Status
from tests.helpers.pool.worker import STACK_SIGNAL, Reply, Request

OUTPUT_LINES = 20

_WORKER_FRAME = f'  File "{worker_module.__file__}"'
"""Begins the part of a stack that is the pool's own."""

_CUT = "\n  ..."
"""Ends a stack too deep to be written whole."""

STACK_LIMIT = 15.0
"""Seconds that a rank has to write its stacks; a busy machine takes its time."""


@dataclass
class Worker:
    """One rank's process and the ways to reach it."""

    rank: int
    process: BaseProcess
    requests: Connection
    log: Path
    stacks: Path

    @property
    def pid(self) -> int:
        """Its process id, which is its process group's too."""
        assert self.process.pid is not None
        return self.process.pid

    def send(self, request: Request) -> None:
        """Ask; a process that is gone shows when its reply is read."""
        try:
            self.requests.send_bytes(pickle.dumps(request))
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self) -> Reply | None:
        """The reply, or ``None`` if the process is gone."""
        try:
            return pickle.loads(self.requests.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def output(self) -> str:
        """The end of what was written since the case began."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-OUTPUT_LINES:])

    def dump_stacks(self) -> str:
        """Where every thread is; empty if the process does not react (it may be stopped)."""
        os.truncate(self.stacks, 0)
        try:
            os.kill(self.pid, STACK_SIGNAL)
        except ProcessLookupError:
            return ""
        text, deadline = "", time.monotonic() + STACK_LIMIT
        while time.monotonic() < deadline and not (self._is_stopped() and not text):
            time.sleep(0.1)
            text, before = self.stacks.read_text(errors="replace"), text
            # On a busy machine the dump may pause, even after a whole thread.
            if text == before and any(map(_is_main, _threads(text))):
                break
        return "\n\n".join(thread.split(_WORKER_FRAME)[0].rstrip() for thread in _threads(text))

    def _is_stopped(self) -> bool:
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # another system, or the process is gone
            return False
        return status.rpartition(")")[2].split()[0] in "tT"

    def kill(self) -> None:
        """End the process and its children, at once."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # it had no time to open its own session, or is gone already
        self.process.join()
        self.requests.close()
        self.process.close()


def _threads(text: str) -> list[str]:
    """The stacks of a dump, without that of the thread that waits for the parent's end."""
    return [thread for thread in text.split("\n\n") if "in die_with_parent" not in thread]


def _is_main(thread: str) -> bool:
    """Whether this is all of the stack of the thread that runs the case, which is written last."""
    return _WORKER_FRAME in thread or thread.rstrip().endswith(_CUT)


def gather(workers: Sequence[Worker], timeout: float, grace: float) -> dict[int, Reply | None]:
    """Replies by rank; ``None`` for a process that ended, no entry for one that is still busy."""
    waiting: dict[Any, Worker] = {worker.requests: worker for worker in workers}
    replies: dict[int, Reply | None] = {}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            worker = waiting.pop(pipe)
            reply = replies[worker.rank] = worker.receive()
            if not succeeded(reply):
                deadline = min(deadline, time.monotonic() + grace)
    return replies


def succeeded(reply: Reply | None) -> bool:
    return reply is not None and reply.ok


def report_of(worker: Worker, replies: Mapping[int, Reply | None], running: str) -> RankReport:
    if worker.rank not in replies:
        stacks = worker.dump_stacks() or "no stack: the process does not react"
        return RankReport(
            worker.rank, "running", headline=running, trace=stacks, stderr=worker.output()
        )
    reply = replies[worker.rank]
    if reply is None:
        worker.process.join(5.0)
        headline = f"its process ended with exit code {worker.process.exitcode}"
        return RankReport(worker.rank, "died", headline=headline, stderr=worker.output())
    status: Status = "returned" if reply.ok else "raised"
    return RankReport(
        worker.rank,
        status,
        value=pickle.loads(reply.value) if reply.value else None,
        error=pickle.loads(reply.error) if reply.error else None,
        headline=reply.headline,
        trace=reply.trace,
        stderr=worker.output(),
    )
