"""``16-mixed`` with a ``GradScaler`` on CPU: the steps of one process, and ranks that skip a step together.

The flag ``precision="16-mixed"`` becomes ``bf16-mixed`` on CPU, so the plugin is given.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import VOCAB, Settings, Small, alone, samples, trainer_of, whole

STEPS, SCALE, SPOILT = 6, 2.0**10, 2
ENGINES: dict[str, Settings] = {
    "ddp": {},
    "fsdp": {"data_parallel": "fsdp"},
    "zero1": {"data_parallel": "zero1"},
    "hsdp": {
        "data_parallel": "hsdp",
        "data_parallel_size": 2,
        "data_parallel_replicate_size": 2,
    },
    "fsdp tp": {"data_parallel": "fsdp", "tensor_parallel_size": 2},
}
RANKS = {"hsdp": 4, "fsdp tp": 4}


class Outcome(NamedTuple):
    """Results of a run."""

    scales: list[float]
    """Of the loss, after each step."""
    weights: torch.Tensor
    moved: list[float]
    """Norm of the change of weights in each step but the first."""


class Scaled(Small):
    """In float32, with a scalar beside its matrices."""

    def __init__(self, spoils: bool = False) -> None:
        super().__init__()
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(11)
        self.model = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=1)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.spoils, self.steps = spoils, 0
        self.seen: list[tuple[float, torch.Tensor]] = []
        self.model.embed.register_forward_hook(self._spoil)

    def _spoil(self, _: nn.Module, args: Any, output: torch.Tensor) -> None:
        """An infinite gradient of one number, which one rank has the part of."""
        if self.spoils and self.steps == SPOILT and output.requires_grad:
            output.register_hook(
                lambda g: g.index_put((torch.tensor([0]),) * 3, g.new_tensor(torch.inf))
            )

    def logits(self, batch: Any) -> torch.Tensor:
        return super().logits(batch) * self.gain

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(self.trainer.precision_plugin.scaler)  # type: ignore[attr-defined]

    def note(self, scaler: Any) -> None:
        self.steps += 1
        flat = torch.cat([whole(p.detach()).flatten() for p in self.parameters()]).clone()
        self.seen.append((scaler.get_scale(), flat))


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)


def batches() -> list[Any]:
    """Two rows in each; data ranks have the same ones, so that their mean is that of one process."""
    rows = samples(2 * STEPS)
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [torch.utils.data.default_collate(list(pair)) for pair in pairs]


def by_trainer(rank: int, world_size: int, settings: Settings | None, spoils: bool) -> Outcome:
    plugins: list[Any] = [MixedPrecision("16-mixed", "cpu", scaler())]
    plugins += [] if settings is None else [PoolEnvironment()]
    module = Scaled(spoils and rank == 0)
    trainer = trainer_of(world_size, settings, plugins=plugins)
    trainer.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return outcome_of(module)


def by_fabric(rank: int, world_size: int, settings: Settings | None, spoils: bool) -> Outcome:
    made = scaler()
    plugins: list[Any] = [FabricPrecision("16-mixed", "cpu", made)]
    if settings is None:
        alone()
        fabric = Fabric(accelerator="cpu", devices=1, plugins=plugins)
    else:
        strategy = FabricStrategy(**{"labels": "aligned", **settings})
        plugins.append(PoolEnvironment())
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    plain = Scaled(spoils and rank == 0)
    model, optimizer = fabric.setup(
        plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    )
    for batch in batches():
        if settings is not None:
            batch = fabric.strategy.shard_batch(batch)  # type: ignore[attr-defined]
        fabric.backward(model(batch))
        fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        if settings is not None:
            fabric.strategy.end_step()  # type: ignore[attr-defined]
        plain.note(made)
    return outcome_of(plain)


def outcome_of(module: Scaled) -> Outcome:
    scales, each = zip(*module.seen, strict=True)
    moved = [float((b - a).norm()) for a, b in pairwise(each)]
    return Outcome(list(scales), each[-1], moved)


def by_fused_adam(rank: int, world_size: int, settings: Settings | None, spoils: bool) -> Outcome:
    """An optimizer that unscales gradients itself, and is told of infinite ones."""
    Scaled.configure_optimizers = lambda self: torch.optim.AdamW(
        self.parameters(), 1e-3, fused=True
    )  # type: ignore[method-assign]
    try:
        return by_trainer(rank, world_size, settings, spoils)
    finally:
        Scaled.configure_optimizers = Small.configure_optimizers  # type: ignore[method-assign]


Driver = Callable[[int, int, Settings | None, bool], Outcome]


QUICK = ("fsdp-by_trainer", "hsdp-by_fabric")


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("driver", [by_trainer, by_fabric, by_fused_adam])
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_are_those_of_one_process(engine: str, driver: Driver) -> None:
    want = run_ranks(1, driver, None, False)[0]
    rounded = 3e-2 if driver is by_fused_adam else 1e-2  # it divides small gradients by themselves
    for got in run_ranks(RANKS.get(engine, 2), driver, ENGINES[engine], False):
        assert got.scales == [SCALE] * STEPS
        assert float((got.weights - want.weights).norm()) < rounded * sum(want.moved)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("driver", [by_trainer, by_fabric, by_fused_adam])
@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_skip_a_step_whose_gradients_overflow_on_one(engine: str, driver: Driver) -> None:
    for got in run_ranks(RANKS.get(engine, 2), driver, ENGINES[engine], True):
        assert got.scales == [SCALE] * SPOILT + [SCALE / 2] * (STEPS - SPOILT)
        assert [moved == 0 for moved in got.moved] == [at == SPOILT for at in range(1, STEPS)]
        assert bool(got.weights.isfinite().all())


def by_a_scaler_of_its_own_ways(rank: int, world_size: int, settings: Settings) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", ShardedGradScaler("cpu"))
    plugins: list[Any] = [plugin, PoolEnvironment()]
    batches_of: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer_of(world_size, settings, plugins=plugins).fit(Scaled(), batches_of)


def test_a_scaler_that_unscales_in_its_own_way_is_refused() -> None:
    """That of FSDP's first version."""
    match = "a ShardedGradScaler, which looks for infinite gradients .* Pass a torch.amp.GradScaler"
    expect_on_every_rank(
        2, by_a_scaler_of_its_own_ways, ENGINES["fsdp"], error=ConfigError, match=match
    )
