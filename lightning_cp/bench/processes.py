"""Processes that measure together: they share one process group, and each returns what it found."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""By device type."""


def on_ranks(
    count: int, function: Callable[..., T], *arguments: Any, device_type: str = "cpu"
) -> list[T]:
    """Call a function on fresh processes that have a process group, one thread each on CPU.

    Args:
        count: processes; on CUDA process i has device i.
        function: can be imported by name; called with ``arguments`` on every rank.
        arguments: can be pickled.
        device_type: ``cpu`` (gloo) or ``cuda`` (NCCL).

    Returns:
        What each rank returned, in rank order.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; carries its traceback.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank,
            (count, folder, function, arguments, device_type),
            nprocs=count,
            start_method="spawn",
        )
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(count)]


def _rank(
    rank: int,
    count: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    device_type: str,
) -> None:
    torch.set_num_threads(1)
    device: torch.device | None = None
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(folder) / "store"), count)
    backend = BACKENDS[device_type]
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, device_id=device)
    try:
        torch.save(function(*arguments), _result(folder, rank))
        dist.barrier()
    except Exception:
        traceback.print_exc()  # the others may wait for this rank: say why before they are stopped
        raise
    dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result-{rank}"
