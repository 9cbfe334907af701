"""A run that is over, or failed, leaves nothing; a model goes when its user and the run are done with it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from lightning_cp import UlyssesRingStrategy
from lightning_cp.engines.ddp import DDPEngine
from lightning_cp.engines.fsdp import ShardedEngine
from lightning_cp.engines.fsdp_gradients import FsdpGradients
from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.models.handle import SwapHandle
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.runs import Run, make_module
from tests.helpers.strategies.small import RING, Batch, Settings, Small, loader, samples, trainer_of
from tests.ranks.strategies.test_fabric import fabric_of

OURS = (
    UlyssesRingStrategy,
    FabricStrategy,
    DDPEngine,
    ShardedEngine,
    FsdpGradients,
    ContextParallelMesh,
    SwapHandle,
)
ENGINES: dict[str, tuple[int, Settings]] = {
    "ddp": (2, {**RING, "data_parallel": "ddp"}),
    "fsdp": (2, {**RING, "data_parallel": "fsdp"}),
    "zero1": (2, {**RING, "data_parallel": "zero1"}),
    "hsdp": (
        4,
        {
            **RING,
            "data_parallel": "hsdp",
            "data_parallel_size": 2,
            "data_parallel_replicate_size": 2,
        },
    ),
    "fsdp and tp": (4, {**RING, "data_parallel": "fsdp", "tensor_parallel_size": 2}),
}
"""Ranks, and the strategy's settings."""


class Failing(Small):
    """Fails in the middle of its step, on all ranks."""

    def loss(self, batch: Batch) -> torch.Tensor:
        super().loss(batch)
        raise ConfigError("on purpose")


def by_trainer(world_size: int, settings: Settings, module: Small) -> None:
    trainer_of(world_size, settings, max_steps=1).fit(module, loader(2))


def by_fabric(world_size: int, settings: Settings, module: Small) -> None:
    """Within a step, which nobody ends."""
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    setup: Any = fabric.setup(module, module.configure_optimizers())
    model, optimizer = setup
    step(fabric, model)
    optimizer.step()


def step(fabric: Fabric, model: Any) -> None:
    """Forward and backward."""
    strategy: Any = fabric.strategy
    batch = strategy.shard_batch({key: x[None] for key, x in samples(1)[0].items()})
    fabric.backward(model.training_step(batch, 0))


DRIVERS: dict[str, Callable[[int, Settings, Small], None]] = {
    "trainer": by_trainer,
    "fabric": by_fabric,
}


def fails(drive: Callable[..., None], world_size: int, settings: Settings) -> None:
    with pytest.raises(ConfigError, match="on purpose"):
        drive(world_size, settings, Failing())


def alive() -> Counter[str]:
    """What there is in this process of what runs make."""
    for _ in range(5):  # what C++ holds of Python goes after it
        gc.collect()
    found = Counter(
        f"{type(x).__module__}.{type(x).__name__}" for x in gc.get_objects() if type(x) in OURS
    )
    found["groups"] = len(dist.distributed_c10d._world.pg_map)
    found["threads"] = len(list(Path("/proc/self/task").iterdir()))
    return found


def leftovers(rank: int, world_size: int, driver: str, settings: Settings) -> dict[str, int]:
    """What two runs that end and two that fail add to what one of each has left."""
    drive, attention = DRIVERS[driver], F.scaled_dot_product_attention
    drive(world_size, settings, Small())
    fails(drive, world_size, settings)
    before = alive()
    for _ in range(2):
        drive(world_size, settings, Small())
        fails(drive, world_size, settings)
    after = alive()
    assert attention is F.scaled_dot_product_attention
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@pytest.mark.nightly
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "engine",
    [
        name if name in ("ddp", "fsdp") else pytest.param(name, marks=pytest.mark.nightly)
        for name in ENGINES
    ],
)
def test_nothing_is_left(driver: str, engine: str) -> None:
    ranks, settings = ENGINES[engine]
    assert run_ranks(ranks, leftovers, driver, settings, timeout=120) == [{}] * ranks


def another_model(rank: int, world_size: int, settings: Settings) -> list[bool]:
    """Whether a Trainer that has fitted another model holds the first one and its parameters."""
    trainer = trainer_of(world_size, settings, max_epochs=-1, max_steps=1)
    module = Small()
    trainer.fit(module, loader(2))
    held = [weakref.ref(module), *map(weakref.ref, module.parameters())]
    trainer.fit_loop.epoch_loop.max_steps = 2
    del module
    trainer.fit(Small(), loader(2))
    alive()
    return [there() is not None for there in held]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "engine", ["ddp", "fsdp", pytest.param("zero1", marks=pytest.mark.nightly)]
)
def test_a_model_goes_when_its_trainer_has_fitted_another(engine: str) -> None:
    ranks, settings = ENGINES[engine]
    for held in run_ranks(ranks, another_model, settings):
        assert not any(held)


def refused(rank: int, world_size: int) -> None:
    fabric = fabric_of(world_size, RING)
    fabric.launch()
    first: Any = fabric.setup_module(Small())
    for _ in range(2):
        mixes = make_module(Run(model="hf"))
        mixes.mixer = nn.Conv1d(4, 4, 3)
        with pytest.raises(ConfigError, match="Conv1d"):
            fabric.setup_module(mixes)
        step(fabric, first)
    step(fabric, fabric.setup_module(Small()))


def test_a_model_that_fabric_refuses_leaves_the_others_alone() -> None:
    run_ranks(2, refused)
