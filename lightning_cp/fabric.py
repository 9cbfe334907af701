"""For Fabric: ``from lightning_cp.fabric import UlyssesRingStrategy``, and ``FabricThroughput``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_cp.utils.lazy import lazy

if TYPE_CHECKING:
    from lightning_cp.strategies.fabric import UlyssesRingStrategy
    from lightning_cp.throughput.fabric import FabricThroughput

__all__ = ["FabricThroughput", "UlyssesRingStrategy"]

_HOME = {
    "FabricThroughput": "lightning_cp.throughput.fabric",
    "UlyssesRingStrategy": "lightning_cp.strategies.fabric",
}

__getattr__, __dir__ = lazy(__name__, _HOME)
