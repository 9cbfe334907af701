"""A machine of a ``hardware.json``: what was measured, in place of what is expected of published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_cp.errors import ConfigError
from lightning_cp.planner.hardware import Hardware
from lightning_cp.planner.machines import Machine, Sending, Sharing, TileRate
from lightning_cp.planner.rates import ComputeRate, KernelRate, LinkRate

TERA, GIGA = 10**12, 10**9
CALLS = {
    "ulysses": ("all-to-all",),
    "ring": ("p2p",),
    "zigzag_llama3": ("all-gather", "reduce-scatter"),
}
"""What the layers of a mode call."""


def machine_of_measured(
    file: Path | str,
    *,
    dtype: str | None = None,
    head_dim: int | None = None,
    wanted: str | None = None,
) -> Machine:
    """The machine of a file; see :func:`of_hardware`.

    Raises:
        ConfigError: no such file, or something that a planner needs was not measured.
    """
    return of_hardware(Hardware.load(file), dtype=dtype, head_dim=head_dim, wanted=wanted)


def of_hardware(
    hardware: Hardware,
    *,
    dtype: str | None = None,
    head_dim: int | None = None,
    wanted: str | None = None,
) -> Machine:
    """The machine that was measured.

    One machine was measured, so links beyond a node are assumed to be as fast as those that were measured,
    its peak is assumed to be what its products reach, and nothing is known of copies to the host.

    Args:
        hardware: what was measured.
        dtype: that is computed with; by default the first that was measured.
        head_dim: entries of a head; by default likewise.
        wanted: a dtype that is taken if it was measured; if not, the machine says what it assumes.

    Raises:
        ConfigError: something that a planner needs was not measured; says what does.
    """
    if dtype is None and any(rate.dtype == wanted for rate in hardware.compute):
        dtype = wanted
    compute = _compute(hardware, dtype)
    kernel = hardware.kernel(compute.dtype, _head_dim(hardware, compute.dtype, head_dim))
    links = [rate for rate in hardware.links if rate.collective != "all-reduce"]
    if not links:
        raise ConfigError(
            f"links of {hardware.device_name} were not measured, which takes two devices or more: python -m "
            "lightning_cp.bench"
        )
    slowest = min(rate.gigabytes_per_second for rate in links)
    products = compute.product_tflops * TERA
    found = Machine(
        hardware.device_name,
        memory=hardware.memory_bytes,
        reserve=0,
        devices_per_node=hardware.devices_per_node,
        peak_flops=products,
        matmul_flops=products,
        attention_forward=kernel.forward_tflops * TERA,
        attention_backward=kernel.backward_tflops * TERA,
        memory_bandwidth=compute.layer_gigabytes_per_second * GIGA,
        node_link=slowest * GIGA,
        net_link=slowest * GIGA,
        latency=max(rate.latency_seconds for rate in links),
        float32_flops=products,
        measured=compute.dtype,
        assumed=_assumed(compute.dtype, wanted or compute.dtype),
        is_cpu=hardware.device_type == "cpu",
        tiles=_tiles(hardware.kernel_lengths, kernel),
        loss_bandwidth=compute.loss_gigabytes_per_second * GIGA,
        optimizer_bandwidth=compute.optimizer_gigabytes_per_second * GIGA,
        sending=_sending(hardware),
    )
    return _with_overheads(found, hardware)


def _assumed(measured: str, wanted: str) -> str:
    if measured == wanted:
        return ""
    return f"{wanted} was not measured there: {measured}'s times are taken"


def _compute(hardware: Hardware, dtype: str | None) -> ComputeRate:
    for rate in hardware.compute:
        if dtype in (None, rate.dtype):
            return rate
    there = ", ".join(rate.dtype for rate in hardware.compute) or "none"
    raise ConfigError(
        f"what {hardware.device_name} computes beside attention was not measured"
        f"{f' with {dtype}' if dtype else ''}, only: {there}. Measure it, with kernels and links: python -m "
        f"lightning_cp.bench{f' dtype={dtype}' if dtype else ''}"
    )


def _head_dim(hardware: Hardware, dtype: str, head_dim: int | None) -> int:
    if head_dim is not None:
        return head_dim
    known = [rate.head_dim for rate in hardware.kernels if rate.dtype == dtype]
    return known[0] if known else 0  # which is refused, with what was measured


def _tiles(rates: Sequence[KernelRate], best: KernelRate) -> tuple[TileRate, ...]:
    """Shortest first."""
    found = [
        TileRate(rate.mask, rate.tokens, rate.forward_tflops * TERA, rate.backward_tflops * TERA)
        for rate in rates
        if (rate.dtype, rate.head_dim) == (best.dtype, best.head_dim)
        and rate.mask in ("full", "causal")
    ]
    return tuple(sorted(found, key=lambda rate: (rate.mask, rate.tokens)))


def _sending(hardware: Hardware) -> tuple[Sending, ...]:
    """What each collective takes of a processor, where that was measured."""
    return tuple(
        Sending(
            rate.collective,
            rate.ranks,
            _call_seconds(hardware, rate),
            rate.cpu_seconds_per_gigabyte / GIGA,
        )
        for rate in hardware.links
        if rate.cpu_seconds_per_gigabyte is not None
    )


def _call_seconds(hardware: Hardware, link: LinkRate) -> float:
    """Of a call, in a group of as many ranks: 0 where there was none, or what it takes was not seen."""
    for rate in hardware.overheads:
        if link.collective in CALLS.get(rate.mode, ()) and rate.ranks == link.ranks:
            return rate.call_seconds or 0.0
    return 0.0


def _sharing(hardware: Hardware, alone: float) -> tuple[Sharing, ...]:
    """By ranks, the mean of all modes."""
    by_ranks: dict[int, list[float]] = {}
    for rate in hardware.overheads:
        if rate.ranks > 1:
            by_ranks.setdefault(rate.ranks, []).append(rate.step_seconds)
    return tuple(
        Sharing(ranks, max(sum(each) / len(each) - alone, 0.0)) for ranks, each in by_ranks.items()
    )


def _with_overheads(machine: Machine, hardware: Hardware) -> Machine:
    alone = next((rate for rate in hardware.overheads if rate.mode == "alone"), None)
    if alone is None:
        return machine
    return replace(
        machine,
        layer_seconds=alone.layer_seconds,
        step_seconds=alone.step_seconds,
        sharing=_sharing(hardware, alone.step_seconds),
    )
