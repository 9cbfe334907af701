"""What a machine reaches, one figure of ``hardware.json`` at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelRate:
    """The fastest kernel for one dtype, head dim and mask, with the sequence at which it was fastest."""

    kernel: str
    dtype: str
    head_dim: int
    mask: str
    """full, causal, window (an eighth of the sequence) or packed (log-normal documents)."""
    tokens: int
    forward_tflops: float
    """10^12 operations a second of one device, of visible pairs: 4 x head dim for each pair and head."""
    backward_tflops: float
    """The same, 2.5 times as many operations."""


@dataclass(frozen=True)
class LinkRate:
    """One collective along one axis of the mesh."""

    axis: str
    """ring, ulysses or loss."""
    collective: str
    """p2p, all-gather, reduce-scatter; all-to-all; all-reduce."""
    ulysses_size: int
    ring_size: int
    gigabytes_per_second: float
    """10^9 bytes that a rank sends to others a second, with the message at which that is most."""
    latency_seconds: float
    """Of the smallest message."""
    cpu_seconds_per_gigabyte: float | None = None
    """What a rank's processor needs for each 10^9 bytes sent, and as many received; ``None``: not known."""

    @property
    def ranks(self) -> int:
        """Of the axis."""
        sizes = {"ulysses": self.ulysses_size, "ring": self.ring_size}
        return sizes.get(self.axis, self.ulysses_size * self.ring_size)


@dataclass(frozen=True)
class ComputeRate:
    """What a device reaches outside of attention, for one dtype. On CPU of one core."""

    dtype: str
    product_tflops: float
    """10^12 operations a second of matrix products, forward and backward together."""
    layer_gigabytes_per_second: float
    """Norms, rotary positions, activations, residuals, in the bytes that a planner counts for them."""
    loss_gigabytes_per_second: float
    """The cross-entropy, likewise."""
    optimizer_gigabytes_per_second: float
    """A step of AdamW, likewise."""


@dataclass(frozen=True)
class OverheadRate:
    """What a step takes whatever its length, in one mode: Python, launches, smallest messages."""

    mode: str
    """alone, ulysses, ring or zigzag_llama3."""
    ranks: int
    """That share a sequence."""
    layer_seconds: float
    """Of each layer, forward and backward."""
    step_seconds: float
    """Beside layers."""
    call_seconds: float | None = None
    """Of a layer, for each call of a collective, what it takes more than alone. ``None``: not measured."""
