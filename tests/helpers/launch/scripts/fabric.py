"""A user's script with Fabric, also for ``fabric run``: ``fabric.py OUT [DEVICES NODES STRATEGY]``."""

from __future__ import annotations

import sys
from typing import Any

from lightning.fabric import Fabric

from tests.helpers.launch.scripts.model import fit_with_fabric

if __name__ == "__main__":
    out, *given = sys.argv[1:]
    options: dict[str, Any] = {}
    if given:
        devices, nodes, strategy = given
        options = {"devices": int(devices), "num_nodes": int(nodes), "strategy": strategy}
    fabric = Fabric(accelerator="cpu", **options)
    if given:  # `fabric run` has launched already
        fabric.launch()
    fit_with_fabric(fabric, out)
