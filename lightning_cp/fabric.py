"""The strategy for Fabric: ``from lightning_cp.fabric import UlyssesRingStrategy``."""

from lightning_cp.strategies.fabric import UlyssesRingStrategy

__all__ = ["UlyssesRingStrategy"]
