"""Random numbers of a rank's own size, which move the generators of ranks that share a sample apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.logs import Told
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    ULYSSES,
    Batch,
    Settings,
    Small,
    loader,
    trainer_of,
)
from tests.ranks.strategies.test_fabric import fabric_of, model_of

SLOW = pytest.mark.nightly


def masked(ids: torch.Tensor) -> torch.Tensor:
    """Noise for some of the rank's tokens: other numbers of them on each rank."""
    return torch.rand_like(ids[ids % 3 == 0], dtype=torch.float32)


def nothing(ids: torch.Tensor) -> None:
    """No number at all."""


def per_token(ids: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(ids, dtype=torch.float32)


def one_rank_more(ids: torch.Tensor) -> None:
    if torch.distributed.get_rank() == 1:
        torch.rand(2, 1)


DRAWS = {draw.__name__: draw for draw in (masked, nothing, per_token, one_rank_more)}
WRONG = ("masked", "one_rank_more")


class Drawing(Small):
    def __init__(self, draw: str, declared: bool) -> None:
        super().__init__()
        self.draw, self.declared = draw, declared
        self.after: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if self.declared:
            strategy: Any = self.trainer.strategy
            with strategy.draw_per("token"):
                DRAWS[self.draw](batch["input_ids"])
        else:
            DRAWS[self.draw](batch["input_ids"])
        self.after.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


def of_draws(lines: list[str]) -> list[str]:
    """Those that speak of different draws."""
    return [line for line in lines if "drew different random numbers" in line]


def train(
    rank: int, world_size: int, settings: Settings, draw: str, declared: bool
) -> tuple[list[str], list[float]]:
    module = Drawing(draw, declared)
    torch.manual_seed(3)
    with Told() as lines:
        trainer_of(world_size, settings).fit(module, loader(6))
    return of_draws(lines), module.after


def loop(
    rank: int, world_size: int, settings: Settings, draw: str, declared: bool
) -> tuple[list[str], list[float]]:
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    plain = model_of()
    setup: Any = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    model, optimizer = setup
    strategy: Any = fabric.strategy
    torch.manual_seed(3)
    after = []
    with Told() as lines:
        for whole in fabric.setup_dataloaders(loader(6), use_distributed_sampler=False):
            batch = strategy.shard_batch(whole)
            logits = model(batch["input_ids"], batch["position_ids"])
            DRAWS[draw](batch["input_ids"])
            after.append(float(torch.rand(())))
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
            )
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return of_draws(lines), after


@pytest.mark.nightly
@pytest.mark.parametrize("draw", list(DRAWS))
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (3, {"ring_size": 3, "ulysses_size": 1}), (2, ULYSSES), (4, HYBRID)],
    ids=["ring", "ring of 3", "ulysses", "hybrid"],
)
def test_said_once(ranks: int, settings: Settings, draw: str) -> None:
    """On the first rank, from the first difference; where there is none, the generators are together."""
    results = run_ranks(ranks, train, settings, draw, False)
    said = [lines for lines, _ in results]
    wrong = draw in WRONG
    assert [len(lines) for lines in said] == [int(wrong), *[0] * (ranks - 1)]
    assert (len({tuple(after) for _, after in results}) > 1) == wrong
    if draw == "masked":
        assert "call 1 of a step" in said[0][0]
        assert "draw_per('token')" in said[0][0]
    if draw == "one_rank_more":
        assert "rank 1 for (2, 1)" in said[0][0]


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [RING, pytest.param(ULYSSES, marks=SLOW)])
def test_declared(settings: Settings) -> None:
    """Within ``draw_per('token')`` a call takes one seed, of whatever shape it is."""
    results = run_ranks(2, train, settings, "masked", True)
    assert all(not said for said, _ in results)
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("draw", ["masked", "per_token"])
def test_with_fabric(draw: str) -> None:
    results = run_ranks(2, loop, RING, draw, False)
    assert [len(said) for said, _ in results] == [int(draw in WRONG), 0]


@pytest.mark.nightly
def test_with_other_data_ranks() -> None:
    """Data ranks may draw as they like; the first group that differs says so, once in the run."""
    settings = {"ring_size": 2, "ulysses_size": 1, "data_parallel_size": 2}
    results = run_ranks(4, train, settings, "one_rank_more", False)
    assert [len(said) for said, _ in results] == [1, 0, 0, 0]


CALLS: list[int] = []
"""Steps: the check sets back what a module and its class have."""


class InTheCheck(Drawing):
    """Rank 1 draws once more in the first step, which is the check's."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if not CALLS:
            one_rank_more(batch["input_ids"])
        CALLS.append(batch_idx)
        return super().training_step(batch, batch_idx)


def train_with_check(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    module = InTheCheck("nothing", False)
    CALLS.clear()
    settings = {**RING, "parity_check": "every_2"}
    with Told() as lines:
        trainer_of(world_size, settings).fit(module, loader(6))
    assert len(CALLS) > len(module.after) == 3
    return of_draws(lines), module.after


@pytest.mark.nightly
def test_steps_of_a_parity_check_do_not_count() -> None:
    """They leave the generators as they were."""
    results = run_ranks(2, train_with_check, timeout=120)
    assert all(not said for said, _ in results)
    assert results[0][1] == results[1][1]
