"""Loads that are refused leave model and optimizer as they were, whatever the engine and whoever loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lightning_cp.checkpoint import whole
from lightning_cp.errors import CheckpointError
from tests.helpers.checkpoint.states import same
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING, Small, loader, trainer_of
from tests.ranks.strategies.test_fabric import Loop

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


class Kept(torch.optim.SGD):
    """Its state has the shape of something else."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.zeros(*parameter.shape[:-1], 3)
        return loss


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """One that is saved, by how it differs from ``own``, which is not loaded from it."""
    parameters = list(model.parameters())
    if kind == "names":
        parameters[0] = parameters.pop()
    if kind == "own":
        parameters.pop()
    if kind == "groups":
        groups = [{"params": parameters[:2]}, {"params": parameters[2:-1]}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if kind == "foreign":
        return torch.optim.AdamW(parameters[:-1], lr=0.1)
    if kind == "shapes":
        return Kept(parameters[:-1], lr=0.1, momentum=0.9)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


KINDS = {
    "names": "of other parameters: only one of the two has",
    "groups": r"groups of \[2, \d+\] parameters, this one of \[\d+\]",
    "foreign": "another kind of optimizer: with amsgrad, .*without dampening",
    "shapes": r"momentum_buffer of .* has shape \[.*3\]",
}


def settings_of(engine: str, world_size: int) -> dict[str, Any]:
    if engine == "hsdp":
        copies = {"data_parallel_size": 2, "data_parallel_replicate_size": 2}
        return {"data_parallel": engine, "context_parallel_size": world_size // 2, **copies}
    return {**RING, "data_parallel": engine}


class Saved(Small):
    """Trains with an optimizer of some kind."""

    def __init__(self, kind: str, shift: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(shift)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.model, self.kind)


def snapshot(model: nn.Module, optimizers: list[Any]) -> Any:
    """Copies of all weights and states, whole."""
    held = [
        {key: whole(x) if isinstance(x, torch.Tensor) else x for key, x in entry.items()}
        for optimizer in optimizers
        for entry in optimizer.state.values()
    ]
    groups = [
        {key: x for key, x in group.items() if key != "params"}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    weights = [whole(p).clone() for p in model.parameters()]  # type: ignore[union-attr]
    return weights, [dict(entry) for entry in held], groups


class Fresh(Saved):
    """Notes what it has when its optimizer is there, before that is loaded."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.groups = snapshot(nn.Module(), [optimizer])[2]
        return optimizer


def by_trainer(rank: int, world_size: int, engine: str, folder: Path) -> None:
    settings = settings_of(engine, world_size)
    for kind in KINDS:
        path = folder / f"{kind}.ckpt"
        trainer = trainer_of(world_size, settings, max_steps=1)
        trainer.fit(Saved(kind), loader(2))
        trainer.save_checkpoint(path)
        module = Fresh("own", shift=1.0)
        before = [p.detach().clone() for p in module.parameters()]
        trainer = trainer_of(world_size, settings, max_steps=2)
        with pytest.raises(CheckpointError, match=KINDS[kind]):
            trainer.fit(module, loader(4), ckpt_path=path)
        weights, states, groups = snapshot(module, trainer.optimizers)
        assert same(weights, before), kind
        assert states == [], kind
        assert same(groups, module.groups), kind


def by_fabric(rank: int, world_size: int, engine: str, folder: Path) -> None:
    settings = settings_of(engine, world_size)
    for kind in KINDS:
        path = folder / f"{kind}.ckpt"
        saved = loop_of(world_size, settings, kind)
        saved.fabric.save(path, {"model": saved.model, "optimizer": saved.optimizer})
        own = loop_of(world_size, settings, "own")
        plain: Any = own.optimizer.optimizer
        before = snapshot(own.model, [plain])
        with pytest.raises(CheckpointError, match=KINDS[kind]):
            own.fabric.load(path, {"model": own.model, "optimizer": own.optimizer})
        assert same(snapshot(own.model, [plain]), before), kind
        assert before[1], "there was no state to be kept"


def loop_of(world_size: int, settings: dict[str, Any], kind: str) -> Loop:
    """After a step, which gives optimizers a state."""
    loop = Loop(world_size, settings, make_optimizer=lambda model: optimizer_of(model, kind))
    batches = loop.batches(4, use_distributed_sampler=False)
    loop.train(loop.shard(batch) for batch in batches)
    loop.end()
    return loop


CELLS = [
    pytest.param(
        engine,
        driver,
        marks=() if (engine, driver) == ("ddp", by_trainer) else pytest.mark.nightly,
    )
    for engine in ("ddp", "fsdp", "zero1", "hsdp")
    for driver in (by_trainer, by_fabric)
]


@pytest.mark.parametrize(("engine", "driver"), CELLS)
def test_refused_loads_change_nothing(engine: str, driver: Any, tmp_path: Path) -> None:
    run_ranks(4 if engine == "hsdp" else 2, driver, engine, tmp_path)


class Growing(Small):
    """Steps that are seen, from files of others."""

    def __init__(self) -> None:
        from tests.helpers.checkpoint.pretrained.models import make

        super().__init__()
        self.model = make()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


def resumed(rank: int, world_size: int, engine: str, folder: Path) -> None:
    settings = {
        **settings_of(engine, world_size),
        "labels": "auto",
        "label_key": "input_ids",
        "pretrained": {"path": str(folder), "progress": False},
    }
    trainer = trainer_of(world_size, settings, max_steps=4)
    trainer.fit(Growing(), loader(4))
    trainer.save_checkpoint(folder / "saved.ckpt")
    trained = [whole(p) for p in trainer.lightning_module.parameters()]
    again = Growing()
    other = trainer_of(world_size, settings, max_steps=2)
    other.fit(again, loader(4), ckpt_path=folder / "saved.ckpt")  # has nothing left to do
    assert same([whole(p) for p in again.parameters()], trained)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_weights_of_a_checkpoint_go_over_pretrained_ones(engine: str, tmp_path: Path) -> None:
    from tests.helpers.checkpoint.pretrained.models import save

    save(tmp_path, seed=6)
    run_ranks(2, resumed, engine, tmp_path)


class Configured(Small):
    """Made of a configuration, and saves it."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.found: Any = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["hyper_parameters"]["config"]


def configured(rank: int, world_size: int, folder: Path) -> None:
    config = OmegaConf.create({"sizes": [1, 2], "nested": {"rate": 0.1, "name": None}})
    assert isinstance(config, DictConfig)
    trainer = trainer_of(world_size, RING, max_steps=1)
    trainer.fit(Configured(config), loader(4))
    trainer.save_checkpoint(folder / "saved.ckpt")
    torch.load(folder / "saved.ckpt", weights_only=True)  # in plain PyTorch, which runs no code
    module, again = Configured(config), trainer_of(world_size, RING, max_steps=2)
    again.fit(module, loader(4), ckpt_path=folder / "saved.ckpt")
    assert again.global_step == 2
    assert type(module.found) is DictConfig
    assert module.found == config


@pytest.mark.nightly
def test_a_config_in_hyperparameters_resumes(tmp_path: Path) -> None:
    run_ranks(2, configured, tmp_path)


def what_is_no_state(rank: int, world_size: int, folder: Path) -> None:
    loop = loop_of(world_size, settings_of("ddp", world_size), "own")
    plain: Any = loop.optimizer.optimizer
    before = snapshot(loop.model, [plain])
    state = {"model": loop.model, "optimizer": loop.optimizer}
    for into, changed, match in (
        (state, {"optimizer": {"lr": 1.0}}, "is not an optimizer's state"),
        (state, {"optimizer": 3}, "is not an optimizer's state"),
        ({"model": loop.model}, {"model": 3}, "is not a model's state, but int"),
    ):
        loop.fabric.save(folder / "foreign.ckpt", {**state, **changed})
        with pytest.raises(CheckpointError, match=match):
            loop.fabric.load(folder / "foreign.ckpt", dict(into))
        assert same(snapshot(loop.model, [plain]), before)


@pytest.mark.nightly
def test_what_is_no_state_at_all_is_refused(tmp_path: Path) -> None:
    run_ranks(2, what_is_no_state, tmp_path)
