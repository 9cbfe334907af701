"""As ``stopped.py``, with a loop of the user's that saves by itself; the arguments are the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.launch.scripts.model import Tiny, text, weights
from tests.helpers.launch.scripts.stopped import EPOCHS, send


def main(fabric: Fabric, out: str, name: str, who: str, at: int, checkpoint: str | None) -> None:
    """Train, unless it is stopped."""
    network = Tiny().network
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=0.01)
    model, optimizer = fabric.setup(network, optimizer)
    loader = fabric.setup_dataloaders(text(), use_distributed_sampler=False)
    strategy: Any = fabric.strategy
    run = strategy.run_state
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "run": run, "step": 0}
    if checkpoint is not None:
        fabric.load(checkpoint, state)
    for _ in range(run.epoch(loader), EPOCHS):
        for batch in loader:
            send(name, who, fabric.global_rank, here=state["step"] + 1 == at)
            fabric.backward(model(**strategy.shard_batch(batch)).loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            if strategy.should_stop:
                fabric.save(Path(out) / "last.ckpt", state)
                fabric.print(f"stopped after step {state['step']}")
                raise SystemExit(143)
    result = {"weights": weights(network), "steps": state["step"]}
    result["state"] = optimizer.state_dict()["state"]
    torch.save(result, Path(out) / f"rank{fabric.global_rank}.pt")


if __name__ == "__main__":
    out, devices, name, who, at, _, *checkpoint = sys.argv[1:]
    start = os.environ.get("START_METHOD", "popen")
    strategy = UlyssesRingStrategy(start_method=start)
    fabric = Fabric(accelerator="cpu", devices=int(devices), strategy=strategy)
    arguments = (out, name, who, int(at), checkpoint[0] if checkpoint else None)
    if start == "popen":
        fabric.launch()
        main(fabric, *arguments)
    else:
        fabric.launch(main, *arguments)  # type: ignore[arg-type]
