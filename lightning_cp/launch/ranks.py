"""Ranks of a launcher: checks that they fit the Trainer's arguments, and their rendezvous after a restart.

Lightning reads a rank from environment variables; which ones depends on the launcher. A wrong one ends in
a rendezvous that waits half an hour for a rank that does not exist. So all of them are compared as soon as
the number of devices is known, when the Trainer or Fabric is made.

Ranks that torchrun restarted meet in a part of its store that no earlier ranks wrote to. Its agents keep one
store for all attempts (without ``--rdzv-backend``, or with ``static``), and PyTorch uses the same keys in
each. A rank may then read the address of a dead one, and its connection is refused. The number of an attempt
(``TORCHELASTIC_RESTART_COUNT``) does not help: every node's agent counts separately. So rank 0 makes up a
name for the attempt. A rank asks for it under a random key, so that the answer cannot be meant for an earlier
rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.distributed import _destroy_dist_connection

from lightning_cp.errors import ConfigError

START_METHODS = ("popen", "spawn", "fork")

_FOLDER = "lightning_cp/attempt"
_PAUSE = 0.05
"""Seconds between two looks of rank 0 for new requests."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts all processes, and the variables in which it gives each its rank."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    per_node: str
    """Variable with the processes per node; not always set."""
    start: str
    """Command that starts the right number of processes."""


TORCHRUN = Launcher(
    *("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    start="torchrun --nproc-per-node={devices} --nnodes={num_nodes}",
)
SLURM = Launcher(
    *("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    start="srun --ntasks-per-node={devices} --nodes={num_nodes}",
)
LAUNCHERS: dict[type[ClusterEnvironment], Launcher] = {
    TorchElasticEnvironment: TORCHRUN,
    SLURMEnvironment: SLURM,
}


def check_start_method(start_method: str) -> None:
    """Refuse start methods that give ranks shared parameters.

    Raises:
        ConfigError: it is none of ``START_METHODS``.
    """
    if start_method == "forkserver":
        raise ConfigError(
            "start_method='forkserver' leaves the ranks of one machine with the same parameters in shared "
            "memory, which every one of them would update. Use 'spawn', 'fork' or 'popen'."
        )
    if start_method not in START_METHODS:
        raise ConfigError(
            f"start_method must be one of {', '.join(START_METHODS)}, got {start_method!r}. "
            "Leave it out for 'popen'."
        )


def check_ranks(
    environment: ClusterEnvironment, start_method: str, devices: int, num_nodes: int
) -> None:
    """Compare the rank variables of this process with the number of devices and nodes.

    Args:
        environment: Lightning's cluster environment, which reads the rank.
        start_method: the strategy's way to start processes, if it has to.
        devices: number of processes on each node.
        num_nodes: number of machines.

    Raises:
        ConfigError: variables are missing or contradict each other or the two numbers, or the start method
            cannot work here.
    """
    launcher = LAUNCHERS.get(type(environment))
    if launcher is not None:
        _check_not_started(launcher, start_method)
        _check_external(launcher, devices, num_nodes)
    elif type(environment) is LightningEnvironment:
        _check_no_notebook(start_method)
        _check_own(start_method, devices, num_nodes)


def _check_external(launcher: Launcher, devices: int, num_nodes: int) -> None:
    """Check the variables of an external launcher, which has started all processes."""
    needed = (launcher.rank, launcher.world_size, launcher.local_rank)
    if missing := [name for name in needed if name not in os.environ]:
        raise ConfigError(
            f"this process was started by {launcher.name}, but {_join_names(missing)} not set (set: "
            f"{_format_variables(needed) or 'none of its variables'}). Start all processes with "
            f"{launcher.start.format(devices=devices, num_nodes=num_nodes)} and do not change its variables."
        )
    rank, world_size = _number(launcher.rank), _number(launcher.world_size)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{launcher.rank}={rank}, but {launcher.world_size}={world_size}: ranks go from 0 to "
            f"{world_size - 1}. {launcher.name} sets both; a program or a profile must have changed one."
        )
    start = launcher.start.format(devices=devices, num_nodes=num_nodes)
    if world_size != devices * num_nodes:
        raise ConfigError(
            f"{launcher.world_size}={world_size} processes were started by {launcher.name}, but "
            f"{_devices_text(devices, num_nodes)}. Start them with {start}, or change devices and num_nodes."
        )
    _check_local(launcher.local_rank, _number(launcher.local_rank), devices)
    if launcher.per_node in os.environ and (here := _number(launcher.per_node)) != devices:
        raise ConfigError(
            f"{launcher.per_node}={here} processes were started on each node by {launcher.name}, but "
            f"{_devices_text(devices, num_nodes)}. devices has to be {here}, or start them with {start}."
        )


def _check_own(start_method: str, devices: int, num_nodes: int) -> None:
    """Check the variables where Lightning starts the processes, or the user did and set LOCAL_RANK."""
    node_rank = _number("NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK", default=0)
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(
            f"NODE_RANK={node_rank}, but num_nodes={num_nodes}: it goes from 0 to {num_nodes - 1}. Set it to "
            "this machine's number, or correct num_nodes."
        )
    _check_nodes_can_meet(num_nodes)
    if start_method != "popen":
        return  # Lightning sets it for its workers; WORLD_SIZE and RANK are not read
    if "LOCAL_RANK" not in os.environ:
        _check_known_launcher()
        return
    local_rank = _number("LOCAL_RANK")
    _check_local("LOCAL_RANK", local_rank, devices)
    world_size = _number("WORLD_SIZE", default=devices * num_nodes)
    if world_size != devices * num_nodes:
        raise ConfigError(
            f"WORLD_SIZE={world_size} is set, but {_devices_text(devices, num_nodes)}. Unset LOCAL_RANK and "
            "WORLD_SIZE to let Lightning start the processes, or make the two agree."
        )
    if world_size > 1 and "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} is set, as in {world_size} processes started by hand, but MASTER_PORT "
            "is not, so they cannot connect. Unset LOCAL_RANK to let Lightning start the processes, or set "
            "MASTER_ADDR and MASTER_PORT in all of them."
        )


def _check_local(name: str, local_rank: int, devices: int) -> None:
    if not 0 <= local_rank < devices:
        raise ConfigError(
            f"{name}={local_rank}, but devices={devices}: the ranks of a node go from 0 to {devices - 1}. "
            "devices is the number of processes on each node."
        )


def _check_nodes_can_meet(num_nodes: int) -> None:
    """Check that several nodes have an address to meet at and a number each."""
    needed = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    given = {*os.environ, *(["NODE_RANK"] if "GROUP_RANK" in os.environ else [])}
    missing = [name for name in needed if name not in given]
    if num_nodes > 1 and missing:
        raise ConfigError(
            f"num_nodes={num_nodes}, but {_join_names(missing)} not set, so the nodes cannot find each "
            "other. Start the program with torchrun or srun, or set MASTER_ADDR, MASTER_PORT and NODE_RANK "
            "on every node."
        )


def _check_known_launcher() -> None:
    """Refuse RANK and WORLD_SIZE without a known launcher: each process would start the others again."""
    names = ("RANK", "WORLD_SIZE")
    if not all(name in os.environ for name in names) or _number("WORLD_SIZE") == 1:
        return
    if not {"NODE_RANK", "GROUP_RANK"} & set(os.environ):
        raise ConfigError(
            f"{_format_variables(names)} are set, but LOCAL_RANK is not, so this process's place on its "
            "node is unknown. Start all processes with torchrun, or set LOCAL_RANK and NODE_RANK in "
            "each, or unset RANK and WORLD_SIZE to let Lightning start them."
        )


def _check_not_started(launcher: Launcher, start_method: str) -> None:
    if start_method != "popen":
        raise ConfigError(
            f"start_method={start_method!r} starts processes, but {launcher.name} has started them already. "
            "Use strategy='ulysses_ring', or start the program without it."
        )


def _check_no_notebook(start_method: str) -> None:
    if start_method != "fork" and (hasattr(sys, "ps1") or sys.flags.interactive):
        raise ConfigError(
            f"start_method={start_method!r} starts processes by running the program again, which does not "
            "exist in a notebook or an interactive session. Use strategy='ulysses_ring_fork', or "
            "UlyssesRingStrategy(start_method='fork')."
        )


def _number(name: str, default: int | None = None) -> int:
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise ConfigError(
            f"{name}={value} is set, but it has to be an integer. Unset it, or let the launcher set it."
        ) from None


def _devices_text(devices: int, num_nodes: int) -> str:
    return f"devices={devices} x num_nodes={num_nodes} is {devices * num_nodes}"


def _format_variables(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _join_names(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


# Hydra sweeps in which a strategy that starts processes would train on the wrong ones.


def check_sweep_launcher(
    environment: ClusterEnvironment | None, start_method: str, processes: int
) -> None:
    """Check that no job that shares its process with a sweep starts ranks.

    Lightning would start them with the command line of the whole sweep. What the first job leaves in the
    environment and in ``torch.distributed`` would decide the ranks of the next ones.

    Args:
        environment: Lightning's cluster environment; ranks started by a cluster or torchrun are accepted.
        start_method: ``popen`` runs the program again; ``spawn`` and ``fork`` do not.
        processes: the world size.

    Raises:
        ConfigError: the job runs inside a sweep, and the ranks would be started by running the program.
    """
    own = isinstance(environment, LightningEnvironment) and start_method == "popen"
    if own and processes > 1 and (launcher := _launcher_of_the_sweep()):
        raise ConfigError(
            f"this job of a Hydra sweep was started by {launcher}, inside the sweep's own process. The "
            f"{processes} processes that it needs would run the whole sweep again, and the next job could "
            "silently train on the wrong number of them. Add hydra/launcher=lightning_cp, which runs each "
            "job in fresh processes."
        )


def _launcher_of_the_sweep() -> str | None:
    """Return the class that runs this sweep's jobs; ``None`` outside a sweep, or if Hydra is not
    loaded."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return None
    config = hydra.HydraConfig.get()
    if config.mode is None or config.mode.name != "MULTIRUN":
        return None
    return str(config.launcher.get("_target_", "another launcher")).rpartition(".")[2]


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
