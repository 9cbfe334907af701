"""A user's script whose function returns something to ``fabric.launch``: ``fabric_returns.py OUT HOW WHAT``.

WHAT: the weights ``whole``, or ``parts`` of them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from lightning_cp.checkpoint import whole
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.launch.scripts.model import Tiny


def work(fabric: Fabric, what: str) -> Any:
    """Spread a model, and bring it together again or not."""
    network = Tiny().network
    fabric.setup(network)
    named = dict(network.named_parameters())
    return {name: whole(x) for name, x in named.items()} if what == "whole" else named


if __name__ == "__main__":
    out, how, what = sys.argv[1:]
    strategy = UlyssesRingStrategy(start_method=how, data_parallel="fsdp")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    torch.save(fabric.launch(partial(work, what=what)), Path(out) / "0.pt")
