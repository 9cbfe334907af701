"""A user's script whose Fabric starts workers: ``fabric_workers.py OUT HOW [LATE]``.

``LATE`` is the rank that ends seconds after the other one.
"""

from __future__ import annotations

import sys
import time
from functools import partial

from lightning.fabric import Fabric

from tests.helpers.launch.scripts.model import fit_with_fabric


def work(fabric: Fabric, out: str, late: int | None) -> None:
    """Train, and maybe do something that concerns nobody else."""
    fit_with_fabric(fabric, out)
    if fabric.global_rank == late:
        time.sleep(2.0)


if __name__ == "__main__":
    out, how, *late = sys.argv[1:]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=f"ulysses_ring_{how}")
    fabric.launch(partial(work, out=out, late=int(late[0]) if late else None))
