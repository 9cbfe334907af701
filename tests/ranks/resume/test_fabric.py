"""A Fabric script that is ended and begun again does what it would have done: bit for bit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from lightning_cp.errors import CheckpointError
from lightning_cp.resume.fabric import RunState
from lightning_cp.resume.record import ResumePoint
from tests.helpers.pool import run_ranks
from tests.helpers.resume.fabric_runs import Script, run
from tests.helpers.resume.runs import loader_of
from tests.helpers.strategies.small import HYBRID, RING, weights


def compare(
    world: int, settings: dict[str, Any], stop: int, since: int, path: Path, **options: Any
) -> None:
    whole = run_ranks(world, run, settings, (stop, path), **options)
    rest = run_ranks(world, run, settings, None, path, 77, **options)
    for one, other in zip(whole, rest, strict=True):
        assert other.seen == one.seen[since:], "samples"
        assert other.losses == one.losses[since:], "losses"
        left = one.validated[len(one.validated) - len(other.validated) :]
        assert repr(other.validated) == repr(left), "validation"
        for name in ("weights", "optimizer", "random"):
            assert getattr(other, name) == getattr(one, name), name


CELLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "mid-epoch": (3, 3, {}),
    "last batch": (10, 10, {}),
    "next epoch": (11, 11, {}),
    "inside a window": (3, 0, {"window": 5}),  # the first one
    "inside a later window": (7, 5, {"window": 5}),
    "inside a window of a later pass": (12, 10, {"window": 5}),
    "stateful stream": (14, 10, {"window": 5, "train": "stateful stream"}),
    "own generator": (13, 13, {"train": "own generator"}),
    "past the wrapper": (7, 5, {"window": 5, "steps": "raw"}),
    "past Fabric": (7, 5, {"window": 5, "steps": "unknown"}),
    "read ahead": (7, 7, {"ahead": True}),
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "hybrid": (4, HYBRID),
    "data parallel": (4, {**RING, "data_parallel_size": 2}),
    "fsdp": (2, {**RING, "data_parallel": "fsdp"}),
    "one rank reads": (2, {**RING, "batch_sync": "broadcast"}),
}


@pytest.mark.quick("inside a window", "past the wrapper")
@pytest.mark.parametrize(
    "name", ["next epoch", "inside a window", "past the wrapper", "past Fabric", "read ahead"]
)
def test_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    stop, since, options = CELLS[name]
    compare(2, RING, stop, since, tmp_path / "saved.ckpt", **options)


ON_MESHES = [
    (mesh, name)
    for mesh in MESHES
    for name in CELLS
    if (mesh, name) != ("data parallel", "stateful stream")  # its data ranks would read the same
]


@pytest.mark.nightly
@pytest.mark.parametrize(("mesh", "name"), ON_MESHES)
def test_on_any_mesh(mesh: str, name: str, tmp_path: Path) -> None:
    stop, since, options = CELLS[name]
    compare(*MESHES[mesh], stop, since, tmp_path / "saved.ckpt", **options)


def other_loaders(rank: int, world: int, path: Path) -> tuple[int, int, list[int], str]:
    """Saved once two loaders are gone; resumed with as many as there are then, and with fewer."""
    script = Script(world, RING, "ordered", 1)
    script.train = script.held_out = None
    train: Any = script.fabric.setup_dataloaders(loader_of("ordered"))
    script.step(next(iter(train)), last=True)
    script.fabric.save(path, script.state)
    del train
    train = script.fabric.setup_dataloaders(loader_of("ordered"))
    script.fabric.load(path, script.state)
    run = script.strategy.run_state
    found = run.epoch(train), run.batches(train), next(iter(train))["number"].flatten().tolist()
    del train
    with pytest.raises(CheckpointError) as refused:
        script.fabric.load(path, script.state)
    return *found, str(refused.value)


def test_loaders_that_are_gone_have_no_place(tmp_path: Path) -> None:
    for *found, message in run_ranks(2, other_loaders, tmp_path / "saved.ckpt"):
        assert found == [0, 1, [2, 3]]
        assert "positions of 1 loaders, but there are 0" in message


def too_few(rank: int, world: int, path: Path) -> str:
    script = Script(world, RING, "ordered", 1)
    next(iter(script.train))
    script.fabric.save(path, script.state)
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter += 1  # or what is loaded would be what is there
    more = script.fabric.setup_dataloaders(loader_of("ordered"))
    before = weights(script.model)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as refused:
        script.fabric.load(path, script.state)
    assert torch.equal(weights(script.model), before)  # type: ignore[arg-type]
    assert script.strategy.run_state.batches(more) == 0
    return str(refused.value)


def test_more_loaders_than_were_saved_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, too_few, tmp_path / "saved.ckpt"):
        assert "positions of 2 loaders" in message
        assert "there are 3" in message


@pytest.mark.nightly
def test_only_steps_of_its_models_are_followed_while_it_is_there() -> None:
    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [torch.ones(1)]}, {"params": module.parameters()}])

    before = len(_global_optimizer_post_hooks)
    models, other = [nn.Linear(1, 1), nn.Linear(1, 1)], nn.Linear(1, 1)
    run: Any = None  # the mesh is not asked
    state = RunState(run)
    for model in models:
        state.track_model(model)
    for module, steps in ((other, False), *((model, True) for model in models)):
        optimizer = optimizer_of(module)
        for _ in range(2):
            state._begun = ResumePoint.now(torch.device("cpu"), [])
            optimizer.step()
            assert (state._begun is None) == steps
    assert len(_global_optimizer_post_hooks) == before + 1
    del state
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before
