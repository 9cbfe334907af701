"""The content of ``hardware.json``: the machine, and the rates that the planner needs, from a run's rows."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_cp.bench.compute import ComputeRow
from lightning_cp.bench.kernels import KernelRow
from lightning_cp.bench.links import LinkRow
from lightning_cp.bench.model_step import OverheadRow
from lightning_cp.bench.settings import BenchSettings, cores
from lightning_cp.comm.consensus import World
from lightning_cp.planner.hardware import (
    ComputeRate,
    Hardware,
    KernelCrossover,
    KernelRate,
    LinkRate,
    OverheadRate,
)


@dataclass(frozen=True)
class MachineInfo:
    """The devices of a run and their software, as PyTorch and the operating system report them."""

    device_type: str
    device_name: str
    """Several names if ranks have different devices."""
    devices: int
    devices_per_node: int
    cores: int
    """Cores that a node's processes may use."""
    memory_bytes: int
    """Memory of the smallest device; on CPU an equal share of the node's."""
    torch_version: str
    cuda_version: str | None
    nccl_version: str | None
    backend: str
    cuda_device_max_connections: str | None
    """The environment variable: it changes how NCCL and kernels share a GPU."""
    network_cards: int | None = None
    """Of a node; ``None``: not known."""

    @property
    def headline(self) -> str:
        """The machine in one line."""
        software = [f"torch {self.torch_version}"]
        software += [f"CUDA {self.cuda_version}"] if self.cuda_version else []
        software += [f"NCCL {self.nccl_version}"] if self.nccl_version else [self.backend]
        many = f"{self.devices} processes on {self.cores} cores"
        devices = many if self.device_type == "cpu" else f"{self.devices} GPUs"
        nodes = self.devices // self.devices_per_node
        where = f" of {nodes} nodes" if nodes > 1 else ""
        return f"{self.device_name}, {devices}{where}, {', '.join(software)}"


def this_machine(settings: BenchSettings) -> MachineInfo:
    """Describe the machine; all ranks must call this together, and all return the same."""
    on_cuda = settings.device_type == "cuda"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", settings.devices))
    every = World().gather(_gpu() if on_cuda else (_cpu(), _memory() // local))
    names, memories = zip(*every, strict=True)
    return MachineInfo(
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
        network_cards(),
    )


def _gpu() -> tuple[str, int]:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found.name, found.total_memory


def _nccl() -> str:
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def _cpu() -> str:
    """Return the CPU model's name where Linux reports it, else the architecture's."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def network_cards(folder: Path = Path("/sys/class/infiniband")) -> int | None:
    """Count the network cards for RDMA, which NCCL uses; ``None`` if there is none."""
    return len(list(folder.iterdir())) or None if folder.is_dir() else None


def _memory() -> int:
    """Return the bytes of the node's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def hardware_of(machine: MachineInfo, found: Mapping[str, Sequence[Any]]) -> Hardware:
    """Return ``hardware.json`` for a machine and the rows of its suites."""
    return Hardware(
        machine.device_type,
        machine.device_name,
        machine.devices,
        machine.devices_per_node,
        machine.memory_bytes,
        machine.torch_version,
        machine.backend,
        kernel_rates(found.get("kernels", ())),
        link_rates(found.get("links", ())),
        kernel_lengths(found.get("kernels", ())),
        compute_rates(found.get("compute", ())),
        overhead_rates(found.get("overheads", ())),
        kernel_crossovers(found.get("kernels", ())),
        machine.network_cards,
    )


def kernel_rates(rows: Sequence[KernelRow]) -> tuple[KernelRate, ...]:
    """Return, for each dtype, head dim and mask, the kernel that is fastest in forward plus backward."""
    best: dict[tuple[str, int, str], KernelRow] = {}
    for row in rows:
        key = (row.dtype, row.head_dim, row.mask)
        if row.both_tflops and row.both_tflops > (_rate(best.get(key))):
            best[key] = row
    return tuple(map(_kernel_rate, best.values()))


def kernel_lengths(rows: Sequence[KernelRow]) -> tuple[KernelRate, ...]:
    """Return the kernels of :func:`kernel_rates` at every length, in the order of rows."""
    named = {(rate.kernel, rate.dtype, rate.head_dim, rate.mask) for rate in kernel_rates(rows)}
    return tuple(
        _kernel_rate(row)
        for row in rows
        if row.both_tflops and (row.kernel, row.dtype, row.head_dim, row.mask) in named
    )


def kernel_crossovers(rows: Sequence[KernelRow]) -> tuple[KernelCrossover, ...]:
    """Return, for each dtype, head dim and mask, the kernel that is fastest first, and each change."""
    best: dict[tuple[str, int, str], dict[int, KernelRow]] = {}
    for row in rows:
        by_length = best.setdefault((row.dtype, row.head_dim, row.mask), {})
        if row.both_tflops and row.both_tflops > _rate(by_length.get(row.tokens)):
            by_length[row.tokens] = row
    found: list[KernelCrossover] = []
    for kind, by_length in best.items():
        before = None
        for tokens, row in sorted(by_length.items()):
            if row.kernel != before:
                found.append(KernelCrossover(*kind, tokens, row.kernel))
            before = row.kernel
    return tuple(found)


def _kernel_rate(row: KernelRow) -> KernelRate:
    rates = (row.forward_tflops or 0.0, row.backward_tflops or 0.0)
    return KernelRate(row.kernel, row.dtype, row.head_dim, row.mask, row.tokens, *rates)


def _rate(row: KernelRow | None) -> float:
    return 0.0 if row is None else row.both_tflops or 0.0


def link_rates(rows: Sequence[LinkRow]) -> tuple[LinkRate, ...]:
    """Return, for each collective along each axis, the best rate and the time of the smallest message."""
    by_link: dict[tuple[str, str, int, int], list[LinkRow]] = {}
    for row in rows:
        key = (row.axis, row.collective, row.ulysses_size, row.ring_size)
        by_link.setdefault(key, []).append(row)
    return tuple(
        LinkRate(
            *key,
            max(row.gigabytes_per_second for row in of_link),
            min(row.seconds for row in of_link if row.latency),
            _cpu_seconds_per_gigabyte(of_link),
        )
        for key, of_link in by_link.items()
    )


def _cpu_seconds_per_gigabyte(rows: Sequence[LinkRow]) -> float | None:
    """Return the slope of the line through all sizes, without the fixed cost of a call."""
    known = [(row.bytes / 1e9, row.cpu_seconds) for row in rows if row.cpu_seconds is not None]
    if len({size for size, _ in known}) < 2:
        return None
    sizes, seconds = zip(*known, strict=True)
    slope = float(np.polyfit(sizes, seconds, 1)[0])
    return slope if slope > 0 else None


def compute_rates(rows: Sequence[ComputeRow]) -> tuple[ComputeRate, ...]:
    """Return the rates of each dtype over all lengths together."""
    by_part: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.what in by_part.get(row.dtype, {}):
            continue
        same = [one for one in rows if (one.dtype, one.what) == (row.dtype, row.what)]
        done = sum(one.operations / 1e12 + one.bytes / 1e9 for one in same)
        by_part.setdefault(row.dtype, {})[row.what] = done / sum(one.seconds for one in same)
    names = ("products", "layer", "loss", "optimizer")
    return tuple(
        ComputeRate(dtype, *(found[name] for name in names)) for dtype, found in by_part.items()
    )


def overhead_rates(rows: Sequence[OverheadRow]) -> tuple[OverheadRate, ...]:
    """Return each mode's overheads; its calls cost its layers' time minus that of ``alone``."""
    alone = min((row.layer_seconds for row in rows if not row.calls), default=None)
    return tuple(
        OverheadRate(
            row.mode,
            row.ranks,
            row.layer_seconds,
            row.step_seconds,
            None if alone is None else _above_zero(row.layer_seconds - alone, row.calls),
        )
        for row in rows
        if row.layer_seconds > 0 and row.step_seconds > 0
    )


def _above_zero(seconds: float, calls: int) -> float | None:
    return seconds / calls if calls and seconds > 0 else None
