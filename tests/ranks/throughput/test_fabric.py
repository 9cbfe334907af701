"""A loop of Fabric counts what the Trainer counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy

from lightning_cp.errors import ConfigError
from lightning_cp.fabric import FabricThroughput
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import HYBRID, LENGTH, RING, Settings
from tests.ranks.strategies.test_fabric import Loop
from tests.ranks.throughput.test_rates import PER_STEP, STEP, Clock

BATCH = 2 * LENGTH


def looped(rank: int, world: int, settings: Settings | None) -> list[dict[str, float]]:
    """Windows of two batches; a step takes twice half a second, what is paused a hundred."""
    loop, clock = Loop(world, settings), Clock()
    options: dict[str, Any] = {"every_n_steps": 2, "warmup_steps": 1, "peak_flops": 1e9}
    throughput = FabricThroughput(loop.fabric, loop.model, **options, clock=clock)
    found: list[dict[str, float]] = []
    try:
        for index, given in enumerate(loop.batches(16)):
            batch = loop.shard(given)
            throughput.begin_batch(batch)
            waits = index % 2 == 0 and loop.parallel
            with loop.fabric.no_backward_sync(loop.model, enabled=waits):
                loop.fabric.backward(loop.loss(batch) / 2)
            clock.now += STEP + 10 * (index == 0)
            if index % 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                found.append(throughput.end_step())
                with throughput.paused(), torch.no_grad():
                    loop.loss(batch)
                    clock.now += 100
        state = throughput.state_dict()
        found.append(throughput.finish())
        found.append(state)
    finally:
        loop.end()
    return found


@pytest.mark.quick("1-None")
@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, None), (1, {}), (2, RING), (4, HYBRID)], ids=str
)
def test_a_loop_counts_the_same(ranks: int, settings: Settings | None) -> None:
    for first, second, third, fourth, last, state in run_ranks(ranks, looped, settings):
        assert first == second == fourth == {}
        rate = PER_STEP / STEP / ranks
        for got, steps in ((third, 3), (last, 4)):
            assert got["throughput/tokens"] == steps * 2 * BATCH
            assert got["throughput/model_flops"] == steps * 2 * PER_STEP
            assert got["throughput/tokens_per_second"] == pytest.approx(BATCH / STEP)
            assert got["throughput/tokens_per_second_per_device"] == pytest.approx(
                BATCH / STEP / ranks
            )
            assert got["throughput/seconds_per_step"] == pytest.approx(2 * STEP)
            assert got["throughput/tflops_per_device"] == pytest.approx(rate / 1e12)
            assert got["throughput/mfu"] == pytest.approx(rate / 1e9)
        assert state == {"tokens": 8 * BATCH, "flops": 8 * PER_STEP, "unknown": 0}


def continued(rank: int, world: int) -> dict[str, Any]:
    loop = Loop(world, None)
    throughput = FabricThroughput(loop.fabric, loop.model)
    throughput.load_state_dict({"tokens": 7, "flops": 9, "unknown": 0})
    throughput.begin_batch(next(iter(loop.batches(2))))
    throughput.end_step()
    state = throughput.state_dict()
    throughput.finish()
    return state


def test_a_loop_goes_on_counting() -> None:
    (state,) = run_ranks(1, continued)
    assert state == {"tokens": 7 + BATCH, "flops": 9, "unknown": 1}, "the model was not called"


def too_early(rank: int, world: int) -> str:
    loop = Loop(world, RING)
    throughput = FabricThroughput(loop.fabric, loop.model)
    try:
        with pytest.raises(ConfigError) as raised:
            throughput.begin_batch(next(iter(loop.batches(2))))
    finally:
        throughput.finish()
    return str(raised.value)


def test_a_batch_is_sharded_before_it_is_counted() -> None:
    for text in run_ranks(2, too_early):
        assert "batch = fabric.strategy.shard_batch(batch) comes first" in text


def test_strategies_of_which_too_little_is_known() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric._strategy = FSDPStrategy()
    with pytest.raises(ConfigError, match="under FSDPStrategy"):
        FabricThroughput(fabric, torch.nn.Linear(2, 2))
