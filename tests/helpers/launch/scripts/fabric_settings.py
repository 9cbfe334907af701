"""A user's script for ``fabric run`` that has the strategy itself: ``fabric_settings.py OUT``."""

from __future__ import annotations

import sys

from lightning.fabric import Fabric

from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.launch.scripts.model import fit_with_fabric

if __name__ == "__main__":
    fit_with_fabric(
        Fabric(accelerator="cpu", strategy=UlyssesRingStrategy(mode="ring")), sys.argv[1]
    )
