"""From the rows of a run to what a planner needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_cp.bench.kernels import KernelRow
from lightning_cp.bench.links import LinkRow
from lightning_cp.bench.machine import Machine
from lightning_cp.planner.hardware import Hardware, KernelRate, LinkRate


def hardware_of(machine: Machine, found: Mapping[str, Sequence[Any]]) -> Hardware:
    """``hardware.json`` of a machine and the rows of its suites."""
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
    )


def kernel_rates(rows: Sequence[KernelRow]) -> tuple[KernelRate, ...]:
    """For each dtype, head dim and mask the row that is fastest forward and backward together."""
    best: dict[tuple[str, int, str], KernelRow] = {}
    for row in rows:
        key = (row.dtype, row.head_dim, row.mask)
        if row.both_tflops and row.both_tflops > (_rate(best.get(key))):
            best[key] = row
    return tuple(
        KernelRate(
            row.kernel,
            *key,
            row.tokens,
            row.forward_tflops or 0.0,
            row.backward_tflops or 0.0,
        )
        for key, row in best.items()
    )


def _rate(row: KernelRow | None) -> float:
    return 0.0 if row is None else row.both_tflops or 0.0


def link_rates(rows: Sequence[LinkRow]) -> tuple[LinkRate, ...]:
    """For each collective along each axis the fastest size, and the time of the smallest message."""
    by_link: dict[tuple[str, str, int, int], list[LinkRow]] = {}
    for row in rows:
        key = (row.axis, row.collective, row.ulysses_size, row.ring_size)
        by_link.setdefault(key, []).append(row)
    return tuple(
        LinkRate(
            *key,
            max(row.gigabytes_per_second for row in of_link),
            min(row.seconds for row in of_link if row.latency),
        )
        for key, of_link in by_link.items()
    )
