"""A user's program in which something goes wrong: ``script.py WAY DEVICES FAULT RANK WHERE [key=value ...]``.

WAY is ``trainer`` or ``fabric``, or one of them with a start method: ``trainer_spawn``. FAULT
happens on RANK in the step that ``AT`` says, WHERE: ``forward``, ``backward`` or ``optimizer``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_cp.fabric
from lightning_cp import UlyssesRingStrategy

AT = 3
STEPS = 6
FIRED = "FAULT FIRED"


def fire(kind: str) -> None:
    """The fault itself; says first that it happens, and when."""
    print(f"{FIRED} {kind} {os.getpid()} {time.time()}", flush=True)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raise":
        raise ValueError("the user's own mistake")
    elif kind == "sleep":
        time.sleep(600)
    elif kind == "exit":
        os._exit(3)
    else:
        raise AssertionError(kind)


class Fault:
    """Happens once, at one place on one rank."""

    def __init__(self, kind: str, rank: int, where: str) -> None:
        self.kind, self.rank, self.where = kind, rank, where
        self.step = 0

    def at(self, where: str, rank: int) -> None:
        """The program comes to this place."""
        if (where, rank, self.step) == (self.where, self.rank, AT):
            fire(self.kind)


class Hooked(torch.autograd.Function):
    """Does nothing, and notices backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Any) -> torch.Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.act()
        return grad, None


class Network(nn.Module):
    """Embedding, attention, output; the fault is between them."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 48) for _ in range(2)])
        self.out = nn.Linear(16, 32)
        self.act = act

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.embedding(input_ids)
        for index, layer in enumerate(self.layers):
            q, k, v = layer(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
                2
            )
            if index == 0:
                self.act("forward")
                x = Hooked.apply(x, lambda: self.act("backward"))
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


class FaultySGD(torch.optim.SGD):
    """Meets the fault in its step."""

    act: Any = None

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        self.act("optimizer")
        return result


class Rows(Dataset[Any]):
    """The same on every rank."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(16) * (index + 3) % 32
        return {"input_ids": ids, "labels": ids.roll(-1)}


class Module(pl.LightningModule):
    """For the Trainer."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.network = Network(self.act)

    def act(self, where: str) -> None:
        self.fault.at(where, self.global_rank)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.fault.step += 1
        return self.network(**batch)

    def configure_optimizers(self) -> Any:
        optimizer = FaultySGD(self.parameters(), lr=0.1)
        optimizer.act = self.act
        return optimizer


def with_trainer(devices: int, fault: Fault, settings: dict[str, Any]) -> None:
    """Lightning's loop."""
    strategy = UlyssesRingStrategy(labels="aligned", num_heads=4, **settings)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(fault), DataLoader(Rows(), batch_size=1))


def loop(fabric: Fabric, fault: Fault) -> None:
    """A user's own."""

    def act(where: str) -> None:
        fault.at(where, fabric.global_rank)

    network = Network(act)
    optimizer: Any = FaultySGD(network.parameters(), lr=0.1)
    optimizer.act = act
    model, optimizer = fabric.setup(network, optimizer)
    strategy: Any = fabric.strategy
    for batch in fabric.setup_dataloaders(DataLoader(Rows(), batch_size=1)):
        fault.step += 1
        loss = model(**strategy.shard_batch(batch))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def with_fabric(devices: int, fault: Fault, settings: dict[str, Any]) -> None:
    strategy = lightning_cp.fabric.UlyssesRingStrategy(labels="aligned", num_heads=4, **settings)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    if strategy._start_method == "popen":
        fabric.launch()
        loop(fabric, fault)
    else:
        launch: Any = fabric.launch
        launch(loop, fault)


if __name__ == "__main__":
    way, devices, kind, rank, where, *more = sys.argv[1:]
    settings: dict[str, Any] = {"step_timeout": 10.0, "first_step_timeout": 60.0}
    for pair in more:
        key, value = pair.split("=")
        settings[key] = float(value) if "timeout" in key else int(value)
    program, _, start = way.partition("_")
    if start:
        settings["start_method"] = start
    run = with_trainer if program == "trainer" else with_fabric
    run(int(devices), Fault(kind, int(rank), where), settings)
    print("ENDED WELL", flush=True)
