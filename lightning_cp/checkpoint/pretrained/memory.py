"""Memory that there is, that was wanted, and that was used at most."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

from lightning_cp.errors import CheckpointError


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on a device; ``None`` where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    limits = [_available(), _below_address_limit(), _below_cgroup_limit()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def peak_bytes() -> int:
    """The most memory that this process has had at once, mapped files included."""
    value = _status("VmHWM")
    if value is not None:
        return value
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def require_memory(
    wanted: int, device: torch.device, parts: list[tuple[str, torch.Size, int]]
) -> None:
    """Refuse what cannot fit, before the first byte is read.

    Args:
        wanted: bytes on this rank.
        device: where.
        parts: of those, the name, the local shape and the bytes of each.

    Raises:
        CheckpointError: naming the largest part.
    """
    free = free_bytes(device)
    if free is not None and wanted > free:
        name, shape, size = max(parts, key=lambda part: part[2])
        raise CheckpointError(
            f"this rank's part of the model takes {wanted:,} bytes on {device}, and {free:,} are free; its "
            f"largest tensor is {name} of shape {list(shape)} here, {size:,} bytes. {HELP}"
        )


def no_room(
    name: str, x: torch.Tensor, device: torch.device, error: BaseException
) -> CheckpointError:
    """The error for a tensor that could not be allocated."""
    free = free_bytes(device)
    wanted = x.numel() * x.element_size()
    return CheckpointError(
        f"no memory for {name} of shape {list(x.shape)} ({x.dtype}) on this rank: {wanted:,} bytes wanted on "
        f"{device}, {'unknown' if free is None else f'{free:,}'} free ({type(error).__name__}). {HELP}"
    )


HELP = (
    "More shards take less on each rank: data_parallel='fsdp' with a larger context_parallel_size, "
    "data_parallel_size or tensor_parallel_size; dtype='bfloat16' halves it."
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


def _below_cgroup_limit() -> int | None:
    with suppress(OSError, ValueError):
        root = Path("/sys/fs/cgroup")
        limit = int((root / "memory.max").read_text())
        return max(0, limit - int((root / "memory.current").read_text()))
    return None


def _status(name: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None
