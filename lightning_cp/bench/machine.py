"""What this machine is, as far as PyTorch and the operating system say."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_cp.bench.settings import Settings, cores
from lightning_cp.bench.together import from_all


@dataclass(frozen=True)
class Machine:
    """The devices of a run and their software."""

    device_type: str
    device_name: str
    """Several, if ranks have different ones."""
    devices: int
    devices_per_node: int
    cores: int
    """That a node's processes may use."""
    memory_bytes: int
    """Of the device that has least; on CPU an equal share of the node's."""
    torch_version: str
    cuda_version: str | None
    nccl_version: str | None
    backend: str
    cuda_device_max_connections: str | None
    """The environment variable: it changes how NCCL and kernels share a GPU."""

    @property
    def headline(self) -> str:
        """In one line."""
        software = [f"torch {self.torch_version}"]
        software += [f"CUDA {self.cuda_version}"] if self.cuda_version else []
        software += [f"NCCL {self.nccl_version}"] if self.nccl_version else [self.backend]
        many = f"{self.devices} processes on {self.cores} cores"
        devices = many if self.device_type == "cpu" else f"{self.devices} GPUs"
        nodes = self.devices // self.devices_per_node
        where = f" of {nodes} nodes" if nodes > 1 else ""
        return f"{self.device_name}, {devices}{where}, {', '.join(software)}"


def this_machine(settings: Settings) -> Machine:
    """Every rank comes here, and all of them find the same."""
    on_cuda = settings.device_type == "cuda"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", settings.devices))
    every = from_all(_gpu() if on_cuda else (_cpu(), _memory() // local))
    names, memories = zip(*every, strict=True)
    return Machine(
        settings.device_type,
        " and ".join(sorted(set(names))),
        settings.devices,
        local,
        cores(),
        min(memories),
        torch.__version__,
        torch.version.cuda if on_cuda else None,
        _nccl() if on_cuda else None,
        dist.get_backend(),
        os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") if on_cuda else None,
    )


def _gpu() -> tuple[str, int]:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found.name, found.total_memory


def _nccl() -> str:
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def _cpu() -> str:
    """The model's name, where Linux tells it; else the architecture's."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _memory() -> int:
    """Bytes of the node's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
