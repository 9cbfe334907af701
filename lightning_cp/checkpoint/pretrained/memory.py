"""Memory limits of devices, machines and containers, and checks against them."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_cp.checkpoint.atomic import machine_id
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; ``None`` if unknown."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept  # PyTorch holds it, and reuses it
    if device.type != "cpu":
        return None
    return _least(_shared(), _below_address_limit())


def _shared() -> int | None:
    """Bytes that all processes of this machine can still allocate together."""
    return _least(_available(), _below_cgroup_limit())


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def peak_bytes() -> int:
    """Peak memory of this process, including mapped files."""
    value = _status("VmHWM")
    if value is not None:
        return value
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class TensorMemory:
    """Bytes of a tensor on this rank."""

    name: str
    shape: torch.Size
    nbytes: int


def bytes_needed(
    parts: Sequence[TensorMemory], device: torch.device, passing: Sequence[TensorMemory] = ()
) -> int:
    """Return the bytes that tensors need at once, which fit into memory; before the first byte is read.

    Args:
        parts: of the model on this rank.
        device: where.
        passing: temporary tensors, in addition to all parts.

    Raises:
        CheckpointError: naming the largest parts.
    """
    more = sum(part.nbytes for part in passing)
    wanted, free = sum(part.nbytes for part in parts) + more, free_bytes(device)
    if free is not None and wanted > free:
        largest = max((*parts, *passing), key=lambda part: part.nbytes)
        beside = f" ({more:,} of them while {_set(passing)} set: {WHOLE_HELP})" if more else ""
        raise CheckpointError(
            f"this rank's part of the model takes {wanted:,} bytes on {device}, and {free:,} are free"
            f"{beside}; its largest tensor is {largest.name} of shape {list(largest.shape)} here, "
            f"{largest.nbytes:,} bytes. {HELP}"
        )
    return wanted


def _set(passing: Sequence[TensorMemory]) -> str:
    taking = [part for part in passing if part.nbytes]
    name = max(taking, key=lambda part: part.nbytes).name
    return f"{name} is" if len(taking) == 1 else f"{name} and {len(taking) - 1} more are"


def check_machine_memory(wanted: int, device: torch.device) -> None:
    """Check that the memory of each machine is enough for all of its ranks. Collective.

    Args:
        wanted: bytes on this rank.
        device: for other devices than the CPU every rank has its own memory.

    Raises:
        CheckpointError: on every rank, naming the ranks of the machine.
    """
    world = World()
    if device.type != "cpu" or world.size == 1:
        return
    every = world.gather((machine_id(), wanted, _shared()))
    for machine in sorted({where for where, _, _ in every}):
        ranks = [rank for rank, (where, _, _) in enumerate(every) if where == machine]
        total = sum(every[rank][1] for rank in ranks)
        known = [free for rank in ranks if (free := every[rank][2]) is not None]
        if known and total > min(known):
            raise CheckpointError(
                f"ranks {ranks[0]} to {ranks[-1]} are on one machine, where their parts of the model take "
                f"{total:,} bytes together, and {min(known):,} are free. Nothing was loaded. {HELP}"
            )


def out_of_memory_error(
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    error: BaseException,
    help_: str = "",
) -> CheckpointError:
    """The error for a tensor that could not be allocated in this dtype."""
    free = free_bytes(device)
    wanted = x.numel() * dtype.itemsize
    return CheckpointError(
        f"no memory for {name} of shape {list(x.shape)} ({dtype}) on this rank: {wanted:,} bytes wanted on "
        f"{device}, {'unknown' if free is None else f'{free:,}'} free ({type(error).__name__}). "
        f"{help_ or HELP}"
    )


@contextmanager
def room_for_whole(name: str, x: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Raise with the tensor's name if a block that allocates or copies all of ``x`` runs out of memory.

    Raises:
        CheckpointError: out of memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        help_ = WHOLE_HELP[0].upper() + WHOLE_HELP[1:] + "."
        raise out_of_memory_error(name, x, x.dtype, device, error, help_) from error


HELP = (
    "More shards take less on each rank: data_parallel='fsdp' with a larger context_parallel_size, "
    "data_parallel_size or tensor_parallel_size; dtype='bfloat16' halves it."
)
WHOLE_HELP = (
    "what no file holds is set whole on every rank, one large module at a time, however sharded; "
    "dtype='bfloat16' halves it, and a checkpoint that holds it takes none of that"
)


def _available() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _below_address_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _status("VmSize")
    return None if limit == resource.RLIM_INFINITY or used is None else max(0, limit - used)


def _below_cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Limit of a container; file cache counts as used there, but is freed when needed."""
    with suppress(OSError, ValueError):
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        return max(0, limit - used + _reclaimable(root))
    return None


def _reclaimable(root: Path) -> int:
    with suppress(OSError, ValueError):
        for line in (root / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0


def _status(name: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None
