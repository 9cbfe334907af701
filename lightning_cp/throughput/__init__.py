"""Throughput of training: tokens and model FLOPs counted once, however many ranks share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_cp.utils.lazy import lazy

if TYPE_CHECKING:
    from lightning_cp.throughput.callback import ThroughputCallback as ThroughputCallback
    from lightning_cp.throughput.fabric import FabricThroughput as FabricThroughput

_HOME = {
    "FabricThroughput": "lightning_cp.throughput.fabric",
    "ThroughputCallback": "lightning_cp.throughput.callback",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy(__name__, _HOME)
