"""``strategy.check_parity`` in loops of Fabric."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import default_collate

from lightning_cp.errors import ConfigError, ParityError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.parity import modules
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import HYBRID, RING, weights
from tests.ranks.parity.test_healthy import worst
from tests.ranks.strategies.test_fabric import fabric_of


def loop(
    rank: int, world_size: int, name: str, settings: dict[str, Any], checked: int | None
) -> tuple[torch.Tensor, str]:
    """Weights after three steps, and what a check before the step ``checked`` said."""
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    strategy: Any = fabric.strategy
    plain: Any = getattr(modules, name)()
    plain.training_step = None
    network = Network(plain)
    set_up: Any = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.05))
    model, optimizer = set_up
    rows, line = modules.rows(6), ""
    for at in range(3):
        batch = default_collate(rows[2 * at : 2 * at + 2])
        if settings.get("labels") == "shift":
            batch["labels"] = batch["input_ids"].clone()
        if at == checked:
            line = strategy.check_parity(batch, model)
        loss = model(strategy.shard_batch(batch))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights(network), line


class Network(torch.nn.Module):
    """Its forward is the loss."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, batch: Any) -> torch.Tensor:
        return self.plain.loss(self.plain.logits(batch), batch)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "engine", ["ddp", "fsdp", pytest.param("zero1", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    ("ranks", "mode"), [(2, RING), (4, HYBRID), (4, {**RING, "data_parallel_size": 2})], ids=str
)
def test_the_loop_is_the_one_without(ranks: int, mode: dict[str, Any], engine: str) -> None:
    settings = {**mode, "data_parallel": engine}
    want = run_ranks(ranks, loop, "Healthy", settings, None, timeout=60)
    got = run_ranks(ranks, loop, "Healthy", settings, 1, timeout=60)
    for (a, line), (b, _) in zip(got, want, strict=True):
        assert torch.equal(a, b)
        assert "agree on 96 tokens (float64" in line


@pytest.mark.quick("OfTargets-fsdp", "OfTargetsIfAny-ddp")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["OfTargets", "OfTargetsIfAny"])
def test_targets_of_the_batch(name: str, engine: str) -> None:
    settings = {**RING, "labels": "shift", "data_parallel": engine}
    for _, line in run_ranks(2, loop, name, settings, 0, timeout=60):
        assert worst(line) < 1e-10


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Summed", "unscaled loss"),
        ("CountedHere", "local positions"),
        ("ShiftedHere", "local labels"),
    ],
)
def test_faults_are_named(name: str, cause: str, engine: str) -> None:
    settings = {**RING, "data_parallel": engine}
    match = rf"(?s)Likely cause: {cause}(?!.*parity_check=)"  # the Trainer's setting
    expect_on_every_rank(2, loop, name, settings, 0, error=ParityError, match=match)


def mixed(rank: int, world_size: int) -> str:
    settings: dict[str, Any] = {**RING, "labels": "shift"}
    plugins: Any = [PoolEnvironment()]
    strategy: Any = UlyssesRingStrategy(**settings)
    options: dict[str, Any] = {"devices": world_size, "precision": "bf16-mixed"}
    fabric = Fabric(accelerator="cpu", strategy=strategy, plugins=plugins, **options)
    fabric.launch()
    plain: Any = modules.OfTargets(torch.float32)
    plain.training_step = None
    model: Any = fabric.setup(Network(plain))
    return strategy.check_parity(default_collate(modules.rows(2)), model)


@pytest.mark.nightly
def test_targets_of_a_batch_that_a_precision_converts() -> None:
    """Of what it is given it makes another batch, with all that is in it."""
    for line in run_ranks(2, mixed, timeout=60):
        assert worst(line) < 5e-2


def without_a_model(rank: int, world_size: int) -> None:
    fabric = fabric_of(world_size, RING)
    fabric.launch()
    strategy: Any = fabric.strategy
    strategy.check_parity({}, lambda batch: batch)


def returning_nothing(rank: int, world_size: int) -> None:
    fabric = fabric_of(world_size, RING)
    fabric.launch()
    strategy: Any = fabric.strategy
    fabric.setup(Network(modules.Healthy()))
    strategy.check_parity(default_collate(modules.rows(2)), lambda batch: None)


def nobody_shares(rank: int, world_size: int) -> str:
    fabric = fabric_of(world_size, {"data_parallel_size": 2})
    fabric.launch()
    strategy: Any = fabric.strategy
    fabric.setup(Network(modules.Healthy()))
    return strategy.check_parity(default_collate(modules.rows(2)), lambda batch: None)


def test_what_cannot_be_compared() -> None:
    match = r"none yet. Call fabric.setup\(model"
    expect_on_every_rank(2, without_a_model, error=ConfigError, match=match)
    match = "cannot compare this step: the step fails on 96 tokens .*returned no loss"
    expect_on_every_rank(2, returning_nothing, error=ConfigError, match=match)
    assert "nothing to compare" in run_ranks(2, nobody_shares)[0]


def test_what_is_the_trainers() -> None:
    """The default is silent; what was asked for and would not come is told, or refused."""
    with pytest.raises(ConfigError, match=r"'every_2' is the Trainer's.*strategy\.check_parity\("):
        UlyssesRingStrategy(parity_check="every_2")
    with pytest.warns(
        UserWarning, match=r"'first_batch' checks nothing .*strategy\.check_parity\("
    ):
        UlyssesRingStrategy(parity_check="first_batch")
    UlyssesRingStrategy()  # a warning would be an error here
    UlyssesRingStrategy(parity_check="off")


class Counting(Network):
    """Ranks have other values in a buffer until DistributedDataParallel gives them the first one's."""

    scale: torch.Tensor

    def __init__(self, plain: Any) -> None:
        super().__init__(plain)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, batch: Any) -> torch.Tensor:
        loss = super().forward(batch) * self.scale.clone()
        self.scale += 0.1 * torch.distributed.get_rank()
        return loss


def counted(rank: int, world_size: int, checked: bool) -> torch.Tensor:
    warnings.filterwarnings("ignore", "steps write to scale")  # that they are unlike is the test
    fabric = fabric_of(world_size, RING)
    fabric.launch()
    strategy: Any = fabric.strategy
    network = Counting(modules.Healthy())
    set_up: Any = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.05))
    model, optimizer = set_up
    for at in range(3):
        batch = default_collate(modules.rows(6)[2 * at : 2 * at + 2])
        if checked:
            strategy.check_parity(batch, model)
        local = strategy.shard_batch(batch)
        loss = model(local)
        strategy.count_targets(local["labels"] != -100)  # a loss times a tensor is not known
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([weights(network), network.scale.reshape(1)])


@pytest.mark.nightly
def test_buffers_are_sent_as_without() -> None:
    want = run_ranks(2, counted, False, timeout=60)
    got = run_ranks(2, counted, True, timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
