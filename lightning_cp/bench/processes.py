"""Processes that measure together in one process group; each returns its result.

Either they are started here, one per device of this machine, or torchrun started them, on one node or
several; then each of them calls :func:`on_torchrun_ranks`.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_cp.errors import ConfigError

T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend of each device type."""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets."""


@dataclass(frozen=True)
class TorchrunRank:
    """The place of this process among those that torchrun started."""

    rank: int
    local_rank: int
    count: int


def torchrun_rank(environment: Mapping[str, str] = os.environ) -> TorchrunRank | None:
    """Read this process's place from torchrun's variables; ``None`` if torchrun did not start it.

    Raises:
        ConfigError: some of torchrun's variables are missing or not a number, or SLURM started several
            processes that do not know each other.
    """
    given = {name: environment[name] for name in VARIABLES if name in environment}
    if not given:
        if environment.get("SLURM_PROCID", "0") != "0":
            raise ConfigError(
                "srun has started several processes that do not know each other. Start torchrun with srun, "
                "once per node: srun --ntasks-per-node=1 torchrun --nproc-per-node=8 -m lightning_cp.bench"
            )
        return None
    numbers = [given.get(name, "") for name in VARIABLES[:3]]
    if len(given) < len(VARIABLES) or not all(number.isdecimal() for number in numbers):
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"a process that torchrun has started has {', '.join(VARIABLES)} in its environment, the first "
            f"three of them numbers; this one has {shown}. Unset them, or start it with torchrun."
        )
    rank, local_rank, count = map(int, numbers)
    return TorchrunRank(rank, local_rank, count)


def on_ranks(
    count: int, function: Callable[..., T], *arguments: Any, device_type: str = "cpu"
) -> list[T]:
    """Call a function on new processes in one process group, with one thread each on CPU.

    Args:
        count: number of processes; on CUDA process i has device i.
        function: importable by name; called with ``arguments`` on every rank.
        arguments: picklable.
        device_type: ``cpu`` (gloo) or ``cuda`` (NCCL).

    Returns:
        Each rank's result, in rank order.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; contains its traceback.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank,
            (count, folder, function, arguments, device_type),
            nprocs=count,
            join=False,
            start_method="spawn",
        )
        assert context is not None
        try:
            while not context.join():
                pass
        except BaseException:  # Ctrl-C too: a rank that waits for a dead one waits forever
            for process in filter(None, context.processes):
                process.kill()
                process.join()
            raise
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(count)]


def on_torchrun_ranks(
    own: TorchrunRank, function: Callable[..., T], *arguments: Any, device_type: str = "cpu"
) -> T:
    """Call a function on the processes that torchrun started; each of them calls this.

    Args:
        own: the place of this process.
        function: called with ``arguments``.
        arguments: the function's arguments.
        device_type: on CUDA this process takes the device of its local rank.
    """
    with _group(device_type, own.local_rank, init_method="env://"):
        return function(*arguments)


def _rank(
    rank: int,
    count: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    device_type: str,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this rank at once, and in silence
    store = dist.FileStore(str(Path(folder) / "store"), count)
    with _group(device_type, rank, store=store, rank=rank, world_size=count):
        torch.save(function(*arguments), _result(folder, rank))


@contextmanager
def _group(device_type: str, device_index: int, **how: Any) -> Iterator[None]:
    """Open a process group for the block; at its end all ranks wait for each other."""
    torch.set_num_threads(1)
    device: torch.device | None = None
    if device_type == "cuda":
        device = torch.device("cuda", device_index)
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[device_type], device_id=device, **how)
    try:
        yield
        dist.barrier()
    except Exception:
        traceback.print_exc()  # the others may wait for this rank: say why before they are stopped
        raise
    dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result-{rank}"
