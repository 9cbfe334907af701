"""One rank of the pool: a process that runs case after case.

It answers each request of the parent with one ``Reply``: ``Regroup`` makes a fresh default group,
``Run`` runs a case, ``Settle`` checks that the ranks are still in step and removes what it left.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._dynamo import trace_rules

from lightning_cp.watchdog.watch import SWITCH
from tests.helpers.pool.isolation import GC_THRESHOLD, Filters, Unraisables, isolated

STACK_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stacks of its threads to its stack file."""

_FAULTS = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
"""Make a worker write the stacks of its threads to its output before it dies."""


@dataclass(frozen=True)
class Regroup:
    """Destroy every group; then, for a ``world_size`` above 0, make a new default group."""

    world_size: int
    store: str


@dataclass(frozen=True)
class Run:
    """Run ``pickle.loads(call)``, a ``(fn, args, kwargs)``, as ``fn(rank, world_size, ...)``."""

    call: bytes
    filters: Filters
    directory: str


@dataclass(frozen=True)
class Settle:
    """Meet the other ranks in a barrier, then destroy the groups that the case made."""


Request = Regroup | Run | Settle


@dataclass(frozen=True)
class Reply:
    """The answer to one request.

    Args:
        ok: nothing was raised.
        value: pickled result of a ``Run``.
        error: pickled exception; empty if it cannot be pickled.
        headline: the exception in one line.
        trace: its traceback.
        group_intact: the default group is the one that ``Regroup`` made.
        groups_made: groups made since ``Regroup``; where ranks differ, so would new groups' names.
    """

    ok: bool
    value: bytes = b""
    error: bytes = b""
    headline: str = ""
    trace: str = ""
    group_intact: bool = False
    groups_made: int = 0


def serve(rank: int, requests: Connection, alive: Connection, log: str, stacks: str) -> None:
    """Answer requests until the parent is gone. Runs in the worker process."""
    from tests.helpers.pool.shared import share  # the fork server has it, the parent need not

    _detach(log, stacks)
    threading.Thread(target=die_with_parent, args=(alive,), daemon=True).start()
    torch.set_num_threads(1)
    os.environ[SWITCH] = "0"  # the pool sees to ranks that hang, and outlives their errors
    gc.set_threshold(*GC_THRESHOLD)
    share()
    gc.freeze()  # what the fork server imported is never garbage; this keeps collections short
    worker = _Worker(rank)
    requests.send_bytes(pickle.dumps(Reply(ok=True)))
    while True:
        try:
            request: Request = pickle.loads(requests.recv_bytes())
        except EOFError:
            return
        reply = worker.answer(request)
        sys.stdout.flush()
        sys.stderr.flush()
        requests.send_bytes(pickle.dumps(reply))


def die_with_parent(alive: Connection) -> None:
    """Block until the parent is gone, however it ended; then end this process and its children."""
    try:
        alive.recv_bytes()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _detach(log: str, stacks: str) -> None:
    """A session of our own (no Ctrl-C; killed with all children), and output into files."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Kept open as long as the process lives: the signal handler writes to the descriptor.
    faulthandler.register(STACK_SIGNAL, os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    faulthandler.enable(2)
    signal.signal = _unless_of_faulthandler(signal.signal)


def _unless_of_faulthandler(set_handler: Callable[..., Any]) -> Callable[..., Any]:
    """Leave faulthandler's signals alone: a Trainer that ends puts back all handlers that Python knows of,
    which for these is the default: to die of them, without a word."""

    def guarded(number: int, handler: Any) -> Any:
        if number == STACK_SIGNAL or number in _FAULTS:
            return signal.getsignal(number)
        return set_handler(number, handler)

    return guarded


class _Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.group: dist.ProcessGroup | None = None
        self.failed = False

    def answer(self, request: Request) -> Reply:
        try:
            if isinstance(request, Run):
                value = self._run(request)
            elif isinstance(request, Settle):
                value = self._settle()
            else:
                value = self._regroup(request)
        except BaseException as error:
            self.failed = True
            return Reply(
                ok=False,
                error=_pickled_error(error),
                headline=_headline(error),
                trace=_trace(error),
            )
        intact = self.group is not None and dist.is_initialized() and self._default() is self.group
        made = dist.distributed_c10d._world.group_count if intact else 0
        return Reply(ok=True, value=value, group_intact=intact, groups_made=made)

    def _regroup(self, request: Regroup) -> bytes:
        self.group = None
        if self.failed:
            gc.collect()  # the case left cycles: its frames and its error
            self.failed = False
        if dist.is_initialized():
            dist.destroy_process_group()
        if request.world_size:
            store = dist.FileStore(request.store, request.world_size)
            with mock.patch.object(trace_rules, "clear_lru_cache"):  # what is there stays right
                dist.init_process_group(
                    "gloo", store=store, rank=self.rank, world_size=request.world_size
                )
            self.group = self._default()
        return b""

    def _run(self, request: Run) -> bytes:
        """The case, with what it leaves behind in Python counted as its own."""
        unraisables = Unraisables()
        with unraisables, isolated(request.filters, request.directory):
            fn: Callable[..., Any]
            fn, args, kwargs = pickle.loads(request.call)
            result = pickle.dumps(fn(self.rank, dist.get_world_size(), *args, **kwargs))
            gc.collect()
        unraisables.check()
        return result

    def _settle(self) -> bytes:
        dist.barrier()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not self.group:
                dist.destroy_process_group(group)
        return b""

    @staticmethod
    def _default() -> dist.ProcessGroup | None:
        return dist.group.WORLD


def _pickled_error(error: BaseException) -> bytes:
    """Empty where an exception does not survive the journey (its ``__init__`` wants more)."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return b""
    return data


def _headline(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def _trace(error: BaseException) -> str:
    """The traceback from the case on, without the frames of this file."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb))
