"""Rendezvous of ranks that torchrun restarted, in a part of its store that no earlier ranks wrote to.

torchrun's agents keep one store for all attempts (without ``--rdzv-backend``, or with ``static``), and
PyTorch uses the same keys in each. A rank may then read the address of a dead one, and its connection is
refused. The number of an attempt (``TORCHELASTIC_RESTART_COUNT``) does not help: every node's agent counts
separately. So rank 0 makes up a name for the attempt. A rank asks for it under a random key, so that the
answer cannot be meant for an earlier rank.
"""

from __future__ import annotations

import atexit
import os
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _destroy_dist_connection

_FOLDER = "lightning_cp/attempt"
_PAUSE = 0.05
"""Seconds between two looks of rank 0 for new requests."""


def connect(strategy: Any) -> None:
    """Make the default group, if torchrun's store may be used more than once."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not (shared and restarts) or dist.is_initialized():
        return
    environment = strategy.cluster_environment
    timeout = strategy._timeout or timedelta(minutes=30)
    rank, world_size = environment.global_rank(), environment.world_size()
    store = dist.TCPStore(
        environment.main_address,
        environment.main_port,
        world_size,
        is_master=False,
        timeout=timeout,
    )
    name = name_of_attempt(store, rank, world_size, timeout)
    backend, device = strategy._get_process_group_backend(), strategy.root_device
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"{_FOLDER}/{name}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )
    if backend == "nccl":
        atexit.register(_destroy_dist_connection)  # Lightning's default


def name_of_attempt(store: dist.Store, rank: int, world_size: int, patience: timedelta) -> str:
    """Return a name for this attempt: the same on all live ranks, and different from earlier attempts.

    Raises:
        DistStoreError: other ranks did not arrive within ``patience``, the store's own timeout, too.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"{_FOLDER}/asks/{rank}", own)
        name = store.get(f"{_FOLDER}/answer/{own}").decode()
        store.set(f"{_FOLDER}/{name}/knows/{rank}", "")
        return name
    end = time.monotonic() + patience.total_seconds()
    unknowing = set(range(1, world_size))
    while unknowing:
        for other in sorted(unknowing):
            _answer(store, other, own)
            if store.check([f"{_FOLDER}/{own}/knows/{other}"]):
                unknowing.discard(other)
        if time.monotonic() > end:
            raise dist.DistStoreError(f"ranks {sorted(unknowing)} have not come")
        time.sleep(_PAUSE if unknowing else 0)
    return own


def _answer(store: dist.Store, rank: int, name: str) -> None:
    """Answer the latest request made as this rank; it may be that of a dead process."""
    key = f"{_FOLDER}/asks/{rank}"
    if store.check([key]):
        store.set(f"{_FOLDER}/answer/{store.get(key).decode()}", name)


# The exit of a program whose ranks use gloo: its threads must be idle before Python ends.
#
# One of them completes a collective, which wakes the main thread, and releases the tensors after that. If
# it gets no turn before Python shuts down (on a busy machine), it cannot release them and aborts the
# process ("terminate called without an active exception", status 134). Destroying the groups does not help:
# they live as long as a sharded tensor refers to its mesh.


IDLE_TIMEOUT = 2.0
"""Seconds in which a thread gets a turn."""
IDLE_PAUSE = 0.005
"""Seconds for which the main thread gives Python to others."""
GLOO_THREAD = "pt_gloo_runloop"
"""PyTorch's name for the threads that complete collectives."""

_registered: list[Finalize] = []


def wait_for_gloo_at_exit() -> None:
    """Register the wait, once per process; in forked ones too, whose ``atexit`` list is not called."""
    if not _registered:
        _registered.append(Finalize(None, wait_for_gloo, exitpriority=0))


def wait_for_gloo() -> None:
    """Wait until gloo's threads are idle; where their states cannot be read, for a moment."""
    end = time.monotonic() + IDLE_TIMEOUT
    time.sleep(IDLE_PAUSE)
    while any(state == "R" for state in thread_states(GLOO_THREAD)) and time.monotonic() < end:
        time.sleep(IDLE_PAUSE)


def thread_states(name: str) -> list[str]:
    """Return the states of this process's threads of that name, as Linux reports them: ``R`` is
    runnable."""
    found = []
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has ended
                called, _, rest = (
                    task.joinpath("stat").read_text().partition("(")[2].rpartition(")")
                )
                found += [rest.split()[0]] if called == name else []
    return found
