"""``16-mixed`` with a ``GradScaler`` on CPU: the steps of one process, and ranks that skip a step together.

The flag ``precision="16-mixed"`` becomes ``bf16-mixed`` on CPU, so the plugin is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.pool import run_ranks
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
    """The scale after each step, the norm of gradients, and weights after the last step."""

    scales: list[float]
    weights: torch.Tensor
    moved: list[float]


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
            output.register_hook(lambda g: g.index_put((torch.tensor([0]),) * 3, g.new_tensor(torch.inf)))

    def logits(self, batch: Any) -> torch.Tensor:
        return super().logits(batch) * self.gain

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(self.trainer.precision_plugin.scaler)  # type: ignore[attr-defined]

    def note(self, scaler: Any) -> None:
        self.steps += 1
        flat = torch.cat([whole(p.detach()).flatten() for p in self.parameters()]).clone()
        self.seen.append((scaler.get_scale(), flat))


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)


def data(rank: int, world_size: int, settings: Settings | None) -> list[Any]:
    """Pairs of rows: those of this data rank, or all in one batch."""
    shared = 1 if settings is None else settings.get("data_parallel_size", 1)
    rows = samples(2 * STEPS * 1)
    return [torch.utils.data.default_collate(rows[2 * i : 2 * i + 2]) for i in range(STEPS)] if shared else []


def by_trainer(rank: int, world_size: int, settings: Settings | None, spoils: bool) -> Outcome:
    plugins: list[Any] = [MixedPrecision("16-mixed", "cpu", scaler())]
    plugins += [] if settings is None else [PoolEnvironment()]
    module = Scaled(spoils and rank == 0)
    trainer = trainer_of(world_size, settings, plugins=plugins, gradient_clip_val=0.5)
    trainer.fit(module, torch.utils.data.DataLoader(data(rank, world_size, settings), batch_size=None))
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
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9))
    for batch in data(rank, world_size, settings):
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
    moved = [float((b - a).norm()) for a, b in zip(each, each[1:], strict=False)]
    return Outcome(list(scales), each[-1], moved)


Driver = Callable[[int, int, Settings | None, bool], Outcome]


@pytest.mark.parametrize("driver", [by_trainer, by_fabric])
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_are_those_of_one_process(engine: str, driver: Driver) -> None:
    want = run_ranks(1, driver, None, False)[0]
    for got in run_ranks(RANKS.get(engine, 2), driver, ENGINES[engine], False):
        print(engine, got.scales, float((got.weights - want.weights).norm() / want.weights.norm()), want.moved, got.moved)
        torch.testing.assert_close(got.weights, want.weights, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("driver", [by_trainer, by_fabric])
@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_skip_a_step_whose_gradients_overflow(engine: str, driver: Driver) -> None:
    outcomes = run_ranks(RANKS.get(engine, 2), driver, ENGINES[engine], True)
    for got in outcomes:
        print(engine, got.scales, got.moved)
        assert got.scales == [SCALE] * SPOILT + [SCALE / 2] * (STEPS - SPOILT)
