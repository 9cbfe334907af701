"""From the rows of a run to what a planner needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_cp.bench.compute import ComputeRow
from lightning_cp.bench.kernels import KernelRow
from lightning_cp.bench.links import LinkRow
from lightning_cp.bench.machine import Machine
from lightning_cp.bench.overheads import OverheadRow
from lightning_cp.planner.hardware import Hardware
from lightning_cp.planner.rates import ComputeRate, KernelRate, LinkRate, OverheadRate


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
        kernel_lengths(found.get("kernels", ())),
        compute_rates(found.get("compute", ())),
        overhead_rates(found.get("overheads", ())),
    )


def kernel_rates(rows: Sequence[KernelRow]) -> tuple[KernelRate, ...]:
    """For each dtype, head dim and mask the row that is fastest forward and backward together."""
    best: dict[tuple[str, int, str], KernelRow] = {}
    for row in rows:
        key = (row.dtype, row.head_dim, row.mask)
        if row.both_tflops and row.both_tflops > (_rate(best.get(key))):
            best[key] = row
    return tuple(map(_kernel_rate, best.values()))


def kernel_lengths(rows: Sequence[KernelRow]) -> tuple[KernelRate, ...]:
    """The kernels that :func:`kernel_rates` names, at every length, in the order of rows."""
    named = {(rate.kernel, rate.dtype, rate.head_dim, rate.mask) for rate in kernel_rates(rows)}
    return tuple(
        _kernel_rate(row)
        for row in rows
        if row.both_tflops and (row.kernel, row.dtype, row.head_dim, row.mask) in named
    )


def _kernel_rate(row: KernelRow) -> KernelRate:
    rates = (row.forward_tflops or 0.0, row.backward_tflops or 0.0)
    return KernelRate(row.kernel, row.dtype, row.head_dim, row.mask, row.tokens, *rates)


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
            _cpu_seconds_per_gigabyte(of_link),
        )
        for key, of_link in by_link.items()
    )


def _cpu_seconds_per_gigabyte(rows: Sequence[LinkRow]) -> float | None:
    """The slope of the line through all sizes: what a call takes whatever its size is left out."""
    known = [(row.bytes / 1e9, row.cpu_seconds) for row in rows if row.cpu_seconds is not None]
    if len({size for size, _ in known}) < 2:
        return None
    sizes, seconds = zip(*known, strict=True)
    slope = float(np.polyfit(sizes, seconds, 1)[0])
    return slope if slope > 0 else None


def compute_rates(rows: Sequence[ComputeRow]) -> tuple[ComputeRate, ...]:
    """For each dtype, of all lengths together."""
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
    """Of each mode; what its calls take is what its layers take more than those of no mode."""
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
