"""For Fabric: ``from lightning_cp.fabric import UlyssesRingStrategy``, and ``FabricThroughput``."""

from lightning_cp.strategies.fabric import UlyssesRingStrategy
from lightning_cp.throughput.fabric import FabricThroughput

__all__ = ["FabricThroughput", "UlyssesRingStrategy"]
