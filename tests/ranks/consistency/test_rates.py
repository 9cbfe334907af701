"""Ranks that would step by other learning rates are told so, and none steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_cp.consistency.settings import numbers_of, settings_of
from lightning_cp.consistency.step_vote import OptimizerStep, StepVote
from lightning_cp.errors import ConfigError
from lightning_cp.loss.counts import TargetCounts
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import HYBRID, RING, Batch, Small, loader, trainer_of, weights
from tests.ranks.strategies.test_fabric import Loop

AT = 1
"""Batches before the one whose step is spoilt."""


class Odd(Small):
    """Sets something of its optimizer on one rank alone."""

    def __init__(self, key: str, value: Any, rank: int) -> None:
        super().__init__()
        self.key, self.value, self.rank = key, value, rank
        self.before = torch.empty(0)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx == AT:
            self.before = weights(self)
            if self.global_rank == self.rank:
                self.trainer.optimizers[0].param_groups[0][self.key] = self.value
        return self.loss(batch)


def trained(
    rank: int, world: int, settings: dict[str, Any], key: str, value: Any, odd: int
) -> tuple[str, bool, int]:
    module = Odd(key, value, odd)
    trainer = trainer_of(world, settings)
    with pytest.raises(ConfigError) as raised:
        trainer.fit(module, loader(8))
    return str(raised.value), torch.equal(weights(module), module.before), trainer.global_step


@pytest.mark.quick("fsdp", "momentum")
@pytest.mark.parametrize(
    ("ranks", "settings", "key", "value", "odd", "says"),
    [
        (2, RING, "lr", 0.5, 1, "lr of group 0 (rank 0: 0.05; rank 1: 0.5)"),
        (
            2,
            {**RING, "data_parallel": "fsdp"},
            "lr",
            torch.tensor(0.5),
            0,
            "(rank 0: 0.5; rank 1: 0.05)",
        ),
        (4, HYBRID, "momentum", 0.5, 2, "momentum of group 0 (ranks 0, 1, 3: 0.9; rank 2: 0.5)"),
    ],
    ids=["ddp", "fsdp", "momentum"],
)
def test_no_rank_steps(
    ranks: int, settings: dict[str, Any], key: str, value: Any, odd: int, says: str
) -> None:
    for said, unchanged, steps in run_ranks(ranks, trained, settings, key, value, odd):
        assert f"step {AT + 1}: the optimizers of ranks have different " in said
        assert says in said
        assert "sync_dist=True" in said
        assert unchanged
        assert steps == AT


def test_equal_numbers_are_equal() -> None:
    """Whatever they are made of, and what they are."""
    x = torch.nn.Parameter(torch.ones(1))
    groups: list[dict[str, Any]] = [{"params": [x], "lr": 1, "betas": (0.5, 0.25)}]
    plain = torch.optim.AdamW(groups)
    other = torch.optim.AdamW([{"params": [x]}], foreach=None)
    (group,) = other.param_groups
    group.update(
        {**plain.param_groups[0], "lr": torch.tensor(1.0), "betas": [np.float64(0.5), 0.25]}
    )
    assert numbers_of(other) == numbers_of(plain)
    assert dict(settings_of(other)) == dict(settings_of(plain))
    assert dict(settings_of(plain))["betas of group 0"] == "0.5, 0.25"
    assert "params of group 0" not in dict(settings_of(plain))
    for key, value in (("lr", np.float32(0.5)), ("betas", [0.5, 0.5]), ("amsgrad", True)):
        before = group[key]
        group[key] = value
        assert numbers_of(other) != numbers_of(plain), key
        group[key] = before


def voted(rank: int, world: int) -> str:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    vote = StepVote(checks=True, counts=TargetCounts())
    vote.note_loss(None)
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.inf)  # which is the scaler's business
    with pytest.raises(ConfigError) as raised:
        vote.before_step(OptimizerStep(1, optimizer, model, None), dist.group.WORLD, object())
    return str(raised.value)


def test_also_with_a_scaler() -> None:
    for said in run_ranks(2, voted):
        assert "lr of group 0 (rank 0: 0.1; rank 1: 0.2)" in said


def looped(rank: int, world: int) -> tuple[str, bool]:
    loop = Loop(world, RING)
    before = loop.weights()
    loop.optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    try:
        with pytest.raises(ConfigError) as raised:
            loop.train(loop.shard(batch) for batch in loop.batches(4))
        return str(raised.value), torch.equal(loop.weights(), before)
    finally:
        loop.end()


def test_nor_in_a_loop_of_fabric() -> None:
    for said, unchanged in run_ranks(2, looped):
        assert "lr of group 0 (rank 0: 0.1; rank 1: 0.2)" in said
        assert unchanged
