"""Ranks that torchrun has started again meet in a part of its store that no earlier ones have written to.

torchrun's agents keep one store for all attempts (without ``--rdzv-backend``, or with ``static``), and
PyTorch uses the same keys in each: a rank may find the address of one that is dead, and is refused a
connection. The number of an attempt (``TORCHELASTIC_RESTART_COUNT``) is no help: every node's agent counts
its own. So rank 0 makes up a name for the attempt. A rank asks for it under a name that it has made up
itself, so that what it is answered cannot be an answer to somebody else.
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
"""Seconds between two looks of rank 0 at who has asked."""


def connect(strategy: Any) -> None:
    """Make the default group, if torchrun's store is going to be used more than once."""
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
        atexit.register(_destroy_dist_connection)  # as Lightning has it


def name_of_attempt(store: dist.Store, rank: int, world_size: int, patience: timedelta) -> str:
    """A name for this attempt, the same on all ranks that live now, and of no earlier one.

    Raises:
        DistStoreError: the others have not come within ``patience``, which is the store's own too.
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
    """Whoever has asked last as this rank; the question may be that of a dead one."""
    key = f"{_FOLDER}/asks/{rank}"
    if store.check([key]):
        store.set(f"{_FOLDER}/answer/{store.get(key).decode()}", name)


# The end of a program whose ranks talk by gloo: its threads come to rest before Python does.
#
# One of them completes a collective, which wakes the main thread, and lets go of the tensors after that.
# Where it has no turn before Python takes itself down, on a busy machine, it finds nobody to let go of
# them, and aborts the process ("terminate called without an active exception", status 134). Destroying the
# groups would not help: they live for as long as some sharded tensor refers to its mesh.


LIMIT = 2.0
"""Seconds in which a thread has a turn."""
PAUSE = 0.005
"""Seconds in which the main thread leaves Python to others."""
THREAD = "pt_gloo_runloop"
"""What PyTorch calls those that complete collectives."""

_registered: list[Finalize] = []


def let_gloo_rest_at_exit() -> None:
    """Once in a process; also where it was forked, so that nothing of ``atexit`` is called."""
    if not _registered:
        _registered.append(Finalize(None, let_gloo_rest, exitpriority=0))


def let_gloo_rest() -> None:
    """Wait until none of gloo's threads has anything to do; where that cannot be seen, for a moment."""
    end = time.monotonic() + LIMIT
    time.sleep(PAUSE)
    while any(state == "R" for state in thread_states(THREAD)) and time.monotonic() < end:
        time.sleep(PAUSE)


def thread_states(name: str) -> list[str]:
    """Of this process's threads of that name, as Linux has them: ``R`` runs or waits for its turn."""
    found = []
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                called, _, rest = (
                    task.joinpath("stat").read_text().partition("(")[2].rpartition(")")
                )
                found += [rest.split()[0]] if called == name else []
    return found
