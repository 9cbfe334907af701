"""Machines: devices with published figures and expected rates, and machines of a ``hardware.json``.

Peaks are from data sheets (dense, bfloat16). Rates are expectations, with their source; measured ones come
from the ``hardware.json`` of ``python -m lightning_cp.bench``.

* attention: FlashAttention-3 on H100, causal, head dim 128, 8k to 32k tokens: 658 to 680 TFLOP/s forward, 518
  to 586 backward (MagiAttention's kernel benchmark); 0.9 of that within a ring. On A100 FlashAttention-2: 205
  and 174 (ring-flash-attention's benchmark). On B200 FlashAttention-4: 1418 and 1209, of its pull request.
* matrix products: 0.65 of the peak, large ones in bfloat16.
* float32: data sheets' figures without TF32, PyTorch's default (SXM; HGX for B200). The same fractions of the
  peak as in bfloat16 are assumed: no benchmark is known.
* links: 0.8 of the bandwidth of one direction of NVLink or of a network card, of which every device has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_cp.errors import ConfigError
from lightning_cp.planner.hardware import ComputeRate, Hardware, KernelRate

GIB = 1 << 30
TERA, GIGA = 10**12, 10**9


@dataclass(frozen=True)
class TileRate:
    """FLOP/s of a kernel on one square tile."""

    mask: str
    """full or causal."""
    tokens: int
    forward: float
    backward: float


@dataclass(frozen=True)
class SharingOverhead:
    """Additional seconds of a step in which ranks share sequences, for their agreements."""

    ranks: int
    seconds: float


def nearest_ranks(found: Sequence[SharingOverhead], ranks: int) -> SharingOverhead:
    """Return the measurement for the nearest number of ranks."""
    return min(found, key=lambda one: abs(math.log(one.ranks / ranks)))


@dataclass(frozen=True)
class Machine:
    """One device of many, and its links. FLOP/s and bytes per second are achieved rates, not peaks."""

    name: str
    memory: int
    """Bytes of one device."""
    reserve: int
    """Bytes that neither tensors nor communicators use: the context, fragments."""
    devices_per_node: int
    peak_flops: float
    """Peak of the data sheet in bfloat16: the denominator of MFU."""
    matmul_flops: float
    attention_forward: float
    """FLOP/s, with 4 x head dim per visible pair."""
    attention_backward: float
    """FLOP/s, with 10 x head dim per visible pair."""
    memory_bandwidth: float
    node_link: float
    """Bytes per second that a device sends within a node, while it receives as many."""
    net_link: float
    """Bytes per second that a network card sends between nodes."""
    network_cards: int = 0
    """Network cards of a node; 0: one for each device."""
    latency: float = 20e-6
    """Seconds of a message and the launch that follows."""
    host_memory: int = 0
    """Bytes of the host for each device."""
    host_link: float = 0.0
    """Bytes per second between a device and its host."""
    float32_flops: float = 0.0
    """Peak in float32, without TF32; 0: not published."""
    measured: str = ""
    """Dtype of measured rates; empty: rates are published ones."""
    assumed: str = ""
    """Assumptions in place of measurements, in words."""
    is_cpu: bool = False
    tiles: tuple[TileRate, ...] = ()
    """Measured rates of tiles, by mask, shortest first; empty: ``attention_*`` for every tile."""
    loss_bandwidth: float = 0.0
    """Bandwidth of the loss; 0: ``memory_bandwidth``."""
    optimizer_bandwidth: float = 0.0
    """Bandwidth of the optimizer; 0: ``memory_bandwidth``."""
    layer_seconds: float = 0.0
    """Seconds of a layer independent of its tokens, forward and backward."""
    step_seconds: float = 0.0
    """Seconds of a step independent of its layers."""
    sharing: tuple[SharingOverhead, ...] = ()
    """Additional time of steps in which ranks share sequences; empty: none."""

    @property
    def in_float32(self) -> Machine:
        """The machine with float32 rates instead of bfloat16 ones, if known; measured rates stay."""
        if self.measured or not self.float32_flops:
            return self
        share = self.float32_flops / self.peak_flops
        return replace(
            self,
            peak_flops=self.float32_flops,
            matmul_flops=share * self.matmul_flops,
            attention_forward=share * self.attention_forward,
            attention_backward=share * self.attention_backward,
        )

    @property
    def has_nccl(self) -> bool:
        """True for GPUs."""
        return not self.is_cpu and self.name != "tpu_v4"

    def cards(self, devices: int) -> int:
        """Return the network cards that a node of so many devices uses."""
        return min(self.network_cards or devices, devices)

    def link(self, *, crosses: bool) -> float:
        """Return the bytes per second of a group that spans nodes (``crosses``), or does not."""
        return self.net_link if crosses else self.node_link


def _hopper(name: str, gib: int, bandwidth: float) -> Machine:
    return Machine(
        name,
        memory=gib * GIB,
        reserve=3 * GIB,
        devices_per_node=8,
        peak_flops=989 * TERA,
        float32_flops=67 * TERA,
        matmul_flops=640 * TERA,
        attention_forward=600 * TERA,
        attention_backward=500 * TERA,
        memory_bandwidth=0.8 * bandwidth,
        node_link=360 * GIGA,
        net_link=40 * GIGA,
        host_memory=240 * GIB,
        host_link=50 * GIGA,
    )


MACHINES: dict[str, Machine] = {
    "h100": _hopper("h100", 79, 3.35 * TERA),
    "h200": _hopper("h200", 139, 4.8 * TERA),
    "a100": Machine(
        "a100",
        memory=79 * GIB,
        reserve=3 * GIB,
        devices_per_node=8,
        peak_flops=312 * TERA,
        float32_flops=19.5 * TERA,
        matmul_flops=220 * TERA,
        attention_forward=185 * TERA,
        attention_backward=155 * TERA,
        memory_bandwidth=0.8 * 2.04 * TERA,
        node_link=240 * GIGA,
        net_link=20 * GIGA,
        host_memory=120 * GIB,
        host_link=25 * GIGA,
    ),
    "b200": Machine(
        "b200",
        memory=178 * GIB,
        reserve=4 * GIB,
        devices_per_node=8,
        peak_flops=2250 * TERA,
        float32_flops=75 * TERA,
        matmul_flops=1460 * TERA,
        attention_forward=1270 * TERA,
        attention_backward=1080 * TERA,
        memory_bandwidth=0.8 * 8 * TERA,
        node_link=720 * GIGA,
        net_link=40 * GIGA,
        host_memory=240 * GIB,
        host_link=50 * GIGA,
    ),
    "tpu_v4": Machine(  # attention as on an A100, scaled by the peaks: this package does not run there
        "tpu_v4",
        memory=32 * GIB,
        reserve=0,
        devices_per_node=4,
        peak_flops=275 * TERA,
        matmul_flops=180 * TERA,
        attention_forward=160 * TERA,
        attention_backward=135 * TERA,
        memory_bandwidth=0.8 * 1.2 * TERA,
        node_link=40 * GIGA,
        net_link=40 * GIGA,
        host_memory=100 * GIB,
        host_link=10 * GIGA,
    ),
}
"""Machines with published figures, by name."""


def machine_of_measured(
    file: Path | str,
    *,
    dtype: str | None = None,
    head_dim: int | None = None,
    wanted: str | None = None,
) -> Machine:
    """Return the machine of a ``hardware.json``; see :func:`machine_of_hardware`.

    Raises:
        ConfigError: no such file, or a rate that the planner needs was not measured.
    """
    return machine_of_hardware(Hardware.load(file), dtype=dtype, head_dim=head_dim, wanted=wanted)


def machine_of_hardware(
    hardware: Hardware,
    *,
    dtype: str | None = None,
    head_dim: int | None = None,
    wanted: str | None = None,
) -> Machine:
    """Return the measured machine.

    Measurements are of one node, so links between nodes are assumed to be as fast as the measured ones, the
    peak is assumed to be the rate of matrix products, and copies to the host are unknown.

    Args:
        hardware: the measurements.
        dtype: of the computation; by default the first measured one.
        head_dim: entries of a head; by default likewise.
        wanted: a preferred dtype; if it was not measured, the machine states its assumption.

    Raises:
        ConfigError: a rate that the planner needs was not measured; names the command that measures it.
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
    machine = Machine(
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
        network_cards=hardware.network_cards or 0,
    )
    return _with_overheads(machine, hardware)


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
        f"compute of {hardware.device_name} besides attention was not measured"
        f"{f' with {dtype}' if dtype else ''}, only: {there}. Measure it, with kernels and links: python -m "
        f"lightning_cp.bench{f' dtype={dtype}' if dtype else ''}"
    )


def _head_dim(hardware: Hardware, dtype: str, head_dim: int | None) -> int:
    if head_dim is not None:
        return head_dim
    known = [rate.head_dim for rate in hardware.kernels if rate.dtype == dtype]
    return known[0] if known else 0  # refused later, with the list of measurements


def _tiles(rates: Sequence[KernelRate], best: KernelRate) -> tuple[TileRate, ...]:
    """Return the rates of tiles, shortest first."""
    found = [
        TileRate(rate.mask, rate.tokens, rate.forward_tflops * TERA, rate.backward_tflops * TERA)
        for rate in rates
        if (rate.dtype, rate.head_dim) == (best.dtype, best.head_dim)
        and rate.mask in ("full", "causal")
    ]
    return tuple(sorted(found, key=lambda rate: (rate.mask, rate.tokens)))


def _sharing_overheads(hardware: Hardware, alone: float) -> tuple[SharingOverhead, ...]:
    """Return the overhead of each number of ranks, the mean of all modes."""
    by_ranks: dict[int, list[float]] = {}
    for rate in hardware.overheads:
        if rate.ranks > 1:
            by_ranks.setdefault(rate.ranks, []).append(rate.step_seconds)
    return tuple(
        SharingOverhead(ranks, max(sum(each) / len(each) - alone, 0.0))
        for ranks, each in by_ranks.items()
    )


def _with_overheads(machine: Machine, hardware: Hardware) -> Machine:
    alone = next((rate for rate in hardware.overheads if rate.mode == "alone"), None)
    if alone is None:
        return machine
    return replace(
        machine,
        layer_seconds=alone.layer_seconds,
        step_seconds=alone.step_seconds,
        sharing=_sharing_overheads(hardware, alone.step_seconds),
    )
