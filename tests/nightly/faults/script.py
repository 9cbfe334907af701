"""A user's program in which something goes wrong: ``script.py WAY DEVICES FAULT RANK WHERE [key=value ...]``.

WAY is ``trainer``, ``manual`` (the Trainer with manual optimization) or ``fabric``, or one of them with a
start method: ``trainer_spawn``. What FAULT and WHERE may be is told in ``fault.py``; ``other`` is a rank that
is given another setting, and ``slow`` one whose files are written slowly. Pairs are the strategy's, besides
``saves=1``: callbacks save, also on exceptions; ``accumulate=2`` micro-batches a step; ``accelerator=gpu``.
With the variable ``HEARD_LATE`` watchers hear of everything half a second late, as on a busy machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_cp.fabric
from lightning_cp import UlyssesRingStrategy
from lightning_cp.checkpoint import full as full_file
from lightning_cp.errors import NonFiniteError
from lightning_cp.watchdog.thread import Watcher
from tests.nightly.faults.fault import Fault, SlowHash, digest_of, fire
from tests.nightly.watchdog.stand_in import Device

STEPS = 8


def hear_late(watcher: Watcher) -> None:
    """As it hears, but whoever ends processes has done so by then."""
    time.sleep(0.5)
    _read_ready(watcher)


_read_ready = Watcher._read_ready
if "HEARD_LATE" in os.environ:  # here, for processes that are spawned
    late: Any = Watcher
    late._read_ready = hear_late


class Hooked(torch.autograd.Function):
    """Does nothing, and notices backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.act(grad), None


class Attention(nn.Module):
    """With its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


class Network(nn.Module):
    """Embedding, attention, output; the fault is between them."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Attention() for _ in range(4)])
        self.out = nn.Linear(16, 32)
        self.fault = fault

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = self.fault.spoil("forward", layer(x))
            x = Hooked.apply(x, lambda grad: self.fault.spoil("backward", grad))
        loss = F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())
        return self.fault.spoil("loss", loss)


class FaultySGD(torch.optim.SGD):
    """Meets the fault in its step."""

    fault: Fault

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        self.fault.at("optimizer")
        return result


class Rows(Dataset[Any]):
    """The same on every rank, but for the fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        ids = torch.arange(16) * (index + 3) % 32
        return self.fault.batch(index, {"input_ids": ids, "labels": ids.roll(-1)})


class Stream(IterableDataset[Any]):
    """Nobody knows how many."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        for index in range(STEPS):
            if (row := self.rows[index]) is None:
                return
            yield row


def loader(fault: Fault) -> DataLoader[Any]:
    rows = Rows(fault)
    return DataLoader(Stream(rows) if fault.kind == "early" else rows, batch_size=1)


class Module(pl.LightningModule):
    """For the Trainer."""

    def __init__(self, fault: Fault, *, manual: bool) -> None:
        super().__init__()
        self.fault, self.automatic_optimization = fault, not manual
        self.network = Network(fault)
        self.before = ""

    def digest(self) -> str:
        """Of weights and optimizer state."""
        return digest_of(dict(self.network.state_dict()), self.trainer.optimizers[0].state_dict())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = self.digest()  # within a step parameters may be gathered

    def training_step(self, batch: Any, index: int) -> Any:
        self.fault.step += 1
        if self.fault.at("again"):
            self.network(**batch)
        loss = self.network(**batch)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.fault.at("between"):
            with torch.no_grad():
                self.network(**batch)

    def configure_optimizers(self) -> Any:
        optimizer = FaultySGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.fault = self.fault
        return optimizer


class Telling(UlyssesRingStrategy):
    """Says when a save begins."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        print("A SAVE BEGINS", flush=True)
        return super().save_checkpoint(*args, **kwargs)


def savers() -> list[Any]:
    """What would save after an error."""
    return [
        ModelCheckpoint("saves", save_on_exception=True, save_last=True),
        OnExceptionCheckpoint("saves"),
    ]


def with_trainer(devices: int, fault: Fault, settings: dict[str, Any], *, manual: bool) -> None:
    """Lightning's loop."""
    saves, accumulated = settings.pop("saves", 0), settings.pop("accumulate", 1)
    trainer = pl.Trainer(
        accelerator=settings.pop("accelerator", "cpu"),
        devices=devices,
        strategy=Telling(labels="aligned", num_heads=4, **settings),
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=bool(saves),
        callbacks=savers() if saves else [],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(fault, manual=manual)
    try:
        trainer.fit(module, loader(fault))
    except NonFiniteError:
        print("AS BEFORE" if module.digest() == module.before else "CHANGED", flush=True)
        raise


def loop(fabric: Fabric, fault: Fault) -> None:
    """A user's own."""
    network = Network(fault)
    optimizer: Any = FaultySGD(network.parameters(), lr=0.1, momentum=0.9)
    optimizer.fault = fault
    model, optimizer = fabric.setup(network, optimizer)
    strategy: Any = fabric.strategy
    for batch in fabric.setup_dataloaders(loader(fault)):
        fault.step += 1
        before = digest_of(dict(network.state_dict()), optimizer.state_dict())
        loss = model(**strategy.shard_batch(batch))
        fabric.backward(loss)
        try:
            optimizer.step()
        except NonFiniteError:
            after = digest_of(dict(network.state_dict()), optimizer.state_dict())
            print("AS BEFORE" if after == before else "CHANGED", flush=True)
            raise
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


def number(text: str) -> Any:
    """What a pair says, if it is one; its words otherwise."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def main(way: str, devices: str, kind: str, rank: str, where: str, *more: str) -> None:
    settings: dict[str, Any] = {"step_timeout": 10.0, "first_step_timeout": 60.0}
    settings["parity_check"] = "off"  # faults are planted into the steps that follow
    for pair in more:
        key, value = pair.split("=")
        settings[key] = number(value)
    program, _, start = way.partition("_")
    if start:
        settings["start_method"] = start
    if kind == "other" and os.environ.get("RANK") == rank:
        fire(kind)
        settings["layout"] = "contiguous"
    if kind == "slow" and os.environ.get("RANK") == rank:
        fire(kind)
        hashed: Any = full_file
        hashed.hashlib = SlowHash
    fault = Fault(kind, int(rank), where)
    if kind == "device" and settings.get("accelerator") != "gpu":
        stand_in = Device()
        stand_in.install(stand_in.wait)
        fault.stop_device = stand_in.stop
    if program == "fabric":
        with_fabric(int(devices), fault, settings)
    else:
        with_trainer(int(devices), fault, settings, manual=program == "manual")
    print("ENDED WELL", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
