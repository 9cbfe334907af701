"""Every engine saves what one process would have saved, and loads what any other has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_cp.checkpoint.read import open_checkpoint
from lightning_cp.checkpoint.reshard import whole
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.checkpoint.cases import cases
from tests.helpers.checkpoint.states import same
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.engine_runs import Adam, Cell
from tests.helpers.strategies.small import loader, trainer_of

# A run that is resumed here need not save again.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")

TWO = {
    "ddp": Cell("ddp", cp=2),
    "fsdp": Cell("fsdp", cp=2),
    "zero1": Cell("zero1", cp=2),
}
FOUR = {"hsdp": Cell("hsdp", cp=2, data=2), "fsdp+tp": Cell("fsdp", cp=2, tp=2)}


def copied(x: torch.Tensor) -> torch.Tensor:
    """As it is now: an optimizer counts steps in place."""
    made = whole(x)
    assert made is not None
    return made.clone()


def states(rank: int, module: Any, optimizer: Any) -> tuple[Any, Any]:
    """A module's and an optimizer's state, whole."""
    weights = {name: copied(x) for name, x in module.state_dict().items()}
    state = optimizer.state_dict()
    entries = {
        at: {key: copied(x) if isinstance(x, torch.Tensor) else x for key, x in entry.items()}
        for at, entry in state["state"].items()
    }
    return weights, {**state, "state": entries}


class Ended(pl.Callback):
    """What a run begins and ends with, before it is taken apart."""

    begun: tuple[Any, Any]
    state: tuple[Any, Any]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begun = states(trainer.global_rank, pl_module, trainer.optimizers[0])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = states(trainer.global_rank, pl_module, trainer.optimizers[0])


def fit(world_size: int, cell: Cell, steps: int, resume: Any = None, **more: Any) -> Ended:
    torch.manual_seed(1234)
    ended = Ended()
    trainer = trainer_of(
        world_size, {**cell.settings, **more}, max_epochs=-1, max_steps=steps, callbacks=[ended]
    )
    trainer.fit(Adam(), loader(1, rows=1), ckpt_path=resume)
    return ended


class Saving(Ended):
    """Saves as the run ends."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        trainer.save_checkpoint(self.path)


def saved_by(world_size: int, cell: Cell, path: str, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(1234)
    saving = Saving(path)
    settings = {**cell.settings, **more}
    trainer = trainer_of(world_size, settings, max_epochs=-1, max_steps=2, callbacks=[saving])
    trainer.fit(Adam(), loader(1, rows=1))
    return saving.state


def by_trainer(rank: int, world_size: int, cell: Cell, other: Cell) -> None:
    through = fit(world_size, cell, 3)
    for form in ("full", "sharded"):
        weights, optimizer = saved_by(world_size, cell, form, checkpoint=form)
        got = open_checkpoint(Path(form)).read()
        assert same(got["state_dict"], weights)
        assert same(got["optimizer_states"], [optimizer])
        assert len(optimizer["state"]) == len(list(Adam().parameters()))
        assert same(fit(world_size, cell, 3, resume=form).state, through.state)
        begun = fit(world_size, other, 3, resume=form).begun
        assert same(begun, (weights, optimizer))
    if rank == 0:  # and plain PyTorch
        loaded = torch.load("full", weights_only=True)
        module = Adam()
        module.load_state_dict(loaded["state_dict"])
        alone = module.configure_optimizers()
        alone.load_state_dict(loaded["optimizer_states"][0])
        assert same(alone.state_dict()["state"], optimizer["state"])
    dist.barrier()


CHANGES = [("ddp", "fsdp"), ("fsdp", "ddp"), ("zero1", "fsdp")]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "other"), cases(CHANGES, [("ddp", "fsdp")]))
def test_the_trainer_saves_and_resumes_with(name: str, other: str) -> None:
    run_ranks(2, by_trainer, TWO[name], TWO[other])


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "other"), [("hsdp", "fsdp+tp"), ("fsdp+tp", "hsdp")])
def test_the_trainer_saves_and_resumes_on_four_ranks_with(name: str, other: str) -> None:
    run_ranks(4, by_trainer, FOUR[name], FOUR[other], timeout=120)


def by_fabric(rank: int, world_size: int, cell: Cell, form: str, background: bool) -> None:
    def begin() -> tuple[Any, Any, Any]:
        settings = {**cell.settings, "checkpoint": form, "async_save": background}
        strategy = FabricStrategy(**settings)
        fabric = Fabric(
            accelerator="cpu", devices=world_size, strategy=strategy, plugins=[PoolEnvironment()]
        )
        fabric.launch()
        torch.manual_seed(1234)
        module = Adam()
        model, optimizer = fabric.setup(module.model, module.configure_optimizers())
        return fabric, model, optimizer

    def train(fabric: Any, model: Any, optimizer: Any, steps: int) -> None:
        (batch,) = loader(1, rows=1)
        for _ in range(steps):
            local = fabric.strategy.shard_batch(dict(batch))
            logits = model(local["input_ids"], local["position_ids"])
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), local["labels"].flatten()
            )
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        fabric.strategy.end_step()

    fabric, model, optimizer = begin()
    train(fabric, model, optimizer, 2)
    fabric.save("a", {"model": model, "optimizer": optimizer, "step": 2, "own": {"x": [1, 2.5]}})
    train(fabric, model, optimizer, 2)
    fabric.strategy.wait_for_saves()
    through = states(rank, model, optimizer)

    fabric, model, optimizer = begin()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load("a", state) == {"own": {"x": [1, 2.5]}}
    assert state["step"] == 2
    assert open_checkpoint(Path("a")).manifest.about.step == 2  # type: ignore[union-attr]
    train(fabric, model, optimizer, 2)
    assert same(states(rank, model, optimizer), through)

    only = fabric.load("a", {"step": 0})  # what is not asked for is returned whole
    assert list(only) == ["model", "optimizer", "own"]
    keep = {"model": lambda name, x: "norm" in name}
    fabric.save("b", {"model": model}, filter=keep)
    fabric.strategy.wait_for_saves()
    names = list(fabric.load("b")["model"])
    assert names
    assert all("norm" in name for name in names)
    fabric.load("b", {"model": model}, strict=False)
    dist.barrier()


SAVED = [("ddp", "full", True), ("fsdp", "sharded", False), ("fsdp", "full", True)]


@pytest.mark.parametrize(("name", "form", "background"), cases(SAVED, [("fsdp", "sharded", False)]))
def test_fabric_saves_and_loads_with(name: str, form: str, background: bool) -> None:
    run_ranks(2, by_fabric, TWO[name], form, background)
