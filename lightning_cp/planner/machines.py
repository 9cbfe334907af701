"""Devices whose figures are published, and what is expected to be reached of them.

Peaks are data sheets' (dense, bfloat16). What is reached of them is an expectation, with its source; a
``hardware.json`` that ``python -m lightning_cp.bench`` wrote holds what a machine of yours reaches.

* attention: FlashAttention-3 on H100, causal, head dim 128, 8k to 32k tokens: 658 to 680 TFLOP/s forward, 518
  to 586 backward (MagiAttention's kernel benchmark); 0.9 of that within a ring. On A100 FlashAttention-2: 205
  and 174 (ring-flash-attention's benchmark). On B200 FlashAttention-4: 1418 and 1209, of its pull request.
* matrix products: 0.65 of the peak, large ones in bfloat16.
* float32: data sheets' figures without TF32, as PyTorch multiplies unless it is told otherwise (SXM; of B200
  HGX). The same shares of them as in bfloat16 are taken to be reached: no benchmark was found.
* links: 0.8 of what a direction of NVLink or the network card of a device carries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

GIB = 1 << 30
TERA, GIGA = 10**12, 10**9


@dataclass(frozen=True)
class TileRate:
    """FLOP/s of a kernel on one tile, as long as it is wide."""

    mask: str
    """full or causal."""
    tokens: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Sending:
    """What a collective takes of a rank's processor."""

    collective: str
    ranks: int
    """Of the group in which it was measured."""
    call_seconds: float
    """Of each call, with what is done around it."""
    seconds_per_byte: float
    """Of each byte that the rank sends; it receives as many."""


@dataclass(frozen=True)
class Sharing:
    """What a step takes more where ranks share sequences: they agree on what they do."""

    ranks: int
    seconds: float


T = TypeVar("T", Sending, Sharing)


def of_nearest(found: Sequence[T], ranks: int) -> T:
    """What was measured of a group of so many ranks, or of the nearest number of them."""
    return min(found, key=lambda one: abs(math.log(one.ranks / ranks)))


@dataclass(frozen=True)
class Machine:
    """One device of many, and its links. FLOP/s and bytes a second are what is reached, not peaks."""

    name: str
    memory: int
    """Bytes of one device."""
    reserve: int
    """Bytes of it that are no tensor's: the context, communicators' buffers, fragments."""
    devices_per_node: int
    peak_flops: float
    """Of the data sheet, in bfloat16: what MFU is a part of."""
    matmul_flops: float
    attention_forward: float
    """Of visible pairs, 4 x head dim each."""
    attention_backward: float
    """The same, 10 x head dim each."""
    memory_bandwidth: float
    node_link: float
    """That a device sends within a node, while it receives as much."""
    net_link: float
    """That a device sends beyond it."""
    latency: float = 20e-6
    """Seconds of a message and the launch that follows."""
    host_memory: int = 0
    """Bytes of the host for each device."""
    host_link: float = 0.0
    """Between a device and its host."""
    float32_flops: float = 0.0
    """The peak in float32, without TF32; 0: none is published."""
    measured: str = ""
    """The dtype of all rates, where they were measured; nothing: they are published ones."""
    assumed: str = ""
    """What was not measured and is taken to be so, in words."""
    is_cpu: bool = False
    tiles: tuple[TileRate, ...] = ()
    """What was measured of tiles, by mask, shortest first; empty: ``attention_*`` whatever the tile."""
    loss_bandwidth: float = 0.0
    """Of the loss; 0: ``memory_bandwidth``."""
    optimizer_bandwidth: float = 0.0
    """Of the optimizer; 0: ``memory_bandwidth``."""
    layer_seconds: float = 0.0
    """That a layer takes whatever its tokens, forward and backward."""
    step_seconds: float = 0.0
    """That a step takes beside, whatever its layers."""
    sharing: tuple[Sharing, ...] = ()
    """What a step takes more where ranks share sequences; empty: nothing."""
    sending: tuple[Sending, ...] = ()
    """What sending takes of processors."""

    @property
    def in_float32(self) -> Machine:
        """With what float32 reaches in place of bfloat16, where it is known; measured rates stay."""
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

    def link(self, *, crosses: bool) -> float:
        """Of a group that lies within nodes, or beyond."""
        return self.net_link if crosses else self.node_link


def _hopper(name: str, gib: int, bandwidth: float) -> Machine:
    return Machine(
        name,
        memory=gib * GIB,
        reserve=4 * GIB,
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
        reserve=4 * GIB,
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
        reserve=5 * GIB,
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
"""By name."""
