"""A user's script whose Fabric starts workers: ``fabric_workers.py OUT HOW``."""

from __future__ import annotations

import sys
from functools import partial

from lightning.fabric import Fabric

from tests.launch.scripts.model import fit_with_fabric

if __name__ == "__main__":
    out, how = sys.argv[1:]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=f"ulysses_ring_{how}")
    fabric.launch(partial(fit_with_fabric, out=out))
