"""Checks of who starts the processes, and that their ranks fit what the Trainer was told.

Lightning reads a rank from environment variables, and which ones depends on who has started the process. A
wrong one ends in a rendezvous that waits half an hour for a rank that does not exist, so all of them are
compared as soon as the number of devices is known, when the Trainer or Fabric is made.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_cp.errors import ConfigError

START_METHODS = ("popen", "spawn", "fork")


@dataclass(frozen=True)
class Launcher:
    """Somebody who starts all processes, and the variables that say which one a process is."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    per_node: str
    """Processes of a node; not always set."""
    start: str
    """How to start the right number."""


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
    """Refuse ways to start processes that do not give every rank parameters of its own.

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
    """Compare what this process was told of its rank with the number of devices and nodes.

    Args:
        environment: who says what rank this is, as Lightning has found or been given it.
        start_method: how the strategy would start processes, if it has to.
        devices: processes of each node.
        num_nodes: machines.

    Raises:
        ConfigError: variables that are missing, contradict each other or the two numbers, or a start method
            that cannot work here.
    """
    launcher = LAUNCHERS.get(type(environment))
    if launcher is not None:
        _refuse_second_start(launcher, start_method)
        _check_external(launcher, devices, num_nodes)
    elif type(environment) is LightningEnvironment:
        _refuse_notebook(start_method)
        _check_own(start_method, devices, num_nodes)


def _check_external(launcher: Launcher, devices: int, num_nodes: int) -> None:
    """All processes were started by somebody else, who has told each of them its rank."""
    needed = (launcher.rank, launcher.world_size, launcher.local_rank)
    if missing := [name for name in needed if name not in os.environ]:
        raise ConfigError(
            f"this process was started by {launcher.name}, but {_listed(missing)} not set; set are "
            f"{_shown(needed) or 'none of its variables'}. Start all processes with "
            f"{launcher.start.format(devices=devices, num_nodes=num_nodes)} and leave its variables alone."
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
            f"{_asked(devices, num_nodes)}. Start them with {start}, or change devices and num_nodes."
        )
    _check_local(launcher.local_rank, devices)
    if launcher.per_node in os.environ and (here := _number(launcher.per_node)) != devices:
        raise ConfigError(
            f"{launcher.per_node}={here} processes were started on each node by {launcher.name}, but "
            f"{_asked(devices, num_nodes)}. devices has to be {here}, or start them with {start}."
        )


def _check_own(start_method: str, devices: int, num_nodes: int) -> None:
    """Lightning starts the processes, or the user has started each of them and says so by LOCAL_RANK."""
    node_rank = _number("NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK", default=0)
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(
            f"NODE_RANK={node_rank}, but num_nodes={num_nodes}: it goes from 0 to {num_nodes - 1}. Set it to "
            "this machine's number, or correct num_nodes."
        )
    _check_nodes_can_meet(num_nodes)
    if start_method != "popen":
        return  # Lightning tells its workers; WORLD_SIZE and RANK are not read
    if "LOCAL_RANK" not in os.environ:
        _refuse_half_a_launcher()
        return
    local_rank = _check_local("LOCAL_RANK", devices)
    world_size = _number("WORLD_SIZE", default=devices * num_nodes)
    if world_size != devices * num_nodes:
        raise ConfigError(
            f"WORLD_SIZE={world_size} is set, but {_asked(devices, num_nodes)}. Unset LOCAL_RANK and "
            "WORLD_SIZE to let Lightning start the processes, or make the two agree."
        )
    if world_size > 1 and "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"LOCAL_RANK={local_rank} is set, so this is taken for one of {world_size} processes that were "
            "started by hand, but MASTER_PORT is not, so they cannot meet. Unset LOCAL_RANK to let Lightning "
            "start the processes, or set MASTER_ADDR and MASTER_PORT in all of them."
        )


def _check_local(name: str, devices: int) -> int:
    local_rank = _number(name)
    if not 0 <= local_rank < devices:
        raise ConfigError(
            f"{name}={local_rank}, but devices={devices}: the ranks of a node go from 0 to {devices - 1}. "
            "devices is the number of processes on each node."
        )
    return local_rank


def _check_nodes_can_meet(num_nodes: int) -> None:
    """Processes of several nodes cannot guess where the first one is, or which node they are on."""
    needed = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    given = {*os.environ, *(["NODE_RANK"] if "GROUP_RANK" in os.environ else [])}
    missing = [name for name in needed if name not in given]
    if num_nodes > 1 and missing:
        raise ConfigError(
            f"num_nodes={num_nodes}, but {_listed(missing)} not set, so the nodes cannot find each other. "
            "Start the program with torchrun or srun, or set MASTER_ADDR, MASTER_PORT and NODE_RANK on every "
            "node."
        )


def _refuse_half_a_launcher() -> None:
    """Refuse a launcher where RANK and WORLD_SIZE are set: each process would start the others once more."""
    names = ("RANK", "WORLD_SIZE")
    if not all(name in os.environ for name in names) or _number("WORLD_SIZE") == 1:
        return
    if not {"NODE_RANK", "GROUP_RANK"} & set(os.environ):
        raise ConfigError(
            f"{_shown(names)} are set, but LOCAL_RANK is not, so it is not known which of its node's "
            "processes this is. Start them with torchrun, which sets all of them, set LOCAL_RANK and "
            "NODE_RANK in each, or unset RANK and WORLD_SIZE to let Lightning start the processes."
        )


def _refuse_second_start(launcher: Launcher, start_method: str) -> None:
    if start_method != "popen":
        raise ConfigError(
            f"start_method={start_method!r} starts processes, but {launcher.name} has started them already. "
            "Use strategy='ulysses_ring', or start the program without it."
        )


def _refuse_notebook(start_method: str) -> None:
    if start_method != "fork" and (hasattr(sys, "ps1") or sys.flags.interactive):
        raise ConfigError(
            f"start_method={start_method!r} starts processes by running a program, and in a notebook or "
            "an interactive session there is none. Use strategy='ulysses_ring_fork', or "
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


def _asked(devices: int, num_nodes: int) -> str:
    return f"devices={devices} x num_nodes={num_nodes} is {devices * num_nodes}"


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _listed(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


# Hydra sweeps in which a strategy that starts its own processes would train on the wrong ones.


def refuse_foreign_launcher(
    environment: ClusterEnvironment | None, start_method: str, processes: int
) -> None:
    """Refuse to start ranks from a job that shares its process with the sweep.

    Lightning would start them with the command line of the whole sweep, and what the first job leaves in the
    environment and in ``torch.distributed`` would decide the ranks of the next ones.

    Args:
        environment: who says what rank this is; ranks that a cluster or torchrun has started are fine.
        start_method: ``popen`` runs the program again; ``spawn`` and ``fork`` do not.
        processes: the world size that is wanted.

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
    """The class that runs this sweep's jobs; None outside a sweep, and where Hydra is not even loaded."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return None
    config = hydra.HydraConfig.get()
    if config.mode is None or config.mode.name != "MULTIRUN":
        return None
    return str(config.launcher.get("_target_", "another launcher")).rpartition(".")[2]
