"""A step that differs when one process repeats it: no difference says anything, and none is rounding."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, default_collate

from lightning_cp.errors import ConfigError, ParityError
from tests.helpers.parity import modules
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import HYBRID, RING, RING3, trainer_of
from tests.ranks.parity.test_fabric import Network
from tests.ranks.parity.test_healthy import CHECKED, Heard
from tests.ranks.strategies.test_fabric import fabric_of

calls = itertools.count()
"""Of a global the check knows nothing."""
FACTORS: dict[str, Callable[[], float]] = {
    "falling": lambda: 0.5 ** next(calls),
    "at last": lambda: 1.0 if next(calls) < 3 else 10.0,
    "later": lambda: float(max(1, next(calls) - LATER)),
    "unseeded": lambda: 1.0 + os.urandom(1)[0],
    "none": lambda: 1.0,
}


LATER = 6 + 2
"""Calls of a check of a loss of no known kind, and of two steps."""


class HandMean(modules.Healthy):
    """Right, and of no known kind."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        labels = batch["labels"].flatten()
        each = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0), reduction="none")
        return (each * (labels != -100)).sum() / (labels != -100).sum()


def module_of(kind: str, factor: str) -> Any:
    global calls
    calls = itertools.count()
    base: Any = HandMean if kind == "HandMean" else getattr(modules, kind)

    class Scaled(base):
        """Its loss has a factor that no attribute knows."""

        def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
            return super().loss(logits, batch) * FACTORS[factor]()

    return Scaled()


def fit(
    rank: int, world_size: int, kind: str, factor: str, settings: dict[str, Any]
) -> tuple[int, list[str], str | None]:
    module = module_of(kind, factor)
    trainer = trainer_of(world_size, {**CHECKED, **settings})
    with Heard() as heard:
        trainer.fit(module, DataLoader(modules.rows(8), batch_size=2))  # type: ignore[arg-type]
    strategy: Any = trainer.strategy
    return module.counted, heard.parity, strategy.parity.report


FSDP = {"data_parallel": "fsdp"}
WAYS = {
    "ring": (2, RING),
    "fsdp": (2, {**RING, **FSDP}),
    "ring of 3": (3, RING3),
    "fsdp of 3": (3, {**RING3, **FSDP}),
    "hybrid": (4, HYBRID),
}
in_every_way = pytest.mark.parametrize(("ranks", "settings"), WAYS.values(), ids=WAYS.keys())


@pytest.mark.nightly
@in_every_way
def test_the_check_is_left_out(ranks: int, settings: dict[str, Any]) -> None:
    """A loss of a known kind is trained on; the first rank says why nothing was compared."""
    for rank, (steps, said, healthy) in enumerate(
        run_ranks(ranks, fit, "Healthy", "falling", settings, timeout=60)
    ):
        assert steps == 4
        assert healthy is None
        assert ["left out because the step is not repeatable" in one for one in said] == [True] * (
            rank == 0
        )


@pytest.mark.quick("ring-falling", "ring-at last")
@pytest.mark.parametrize("factor", ["falling", "at last"])
@in_every_way
def test_a_loss_of_no_known_kind_is_not_cleared(
    ranks: int, settings: dict[str, Any], factor: str
) -> None:
    """The sum is refused where nothing else changes, and asks what it counts where something does."""
    match = r"(?s)count_targets\(mask or number\).*its loss differs by .*more than rounding"
    expect_on_every_rank(ranks, fit, "Summed", factor, settings, error=ConfigError, match=match)


@pytest.mark.nightly
def test_a_later_check_that_is_left_out_asks_for_nothing() -> None:
    """The first one has cleared the loss, for the run."""
    settings = {**RING, "parity_check": "every_2"}
    got = run_ranks(2, fit, "HandMean", "later", settings, timeout=60)
    agrees, left_out = got[0][1]
    assert "and with some of their labels left out" in agrees
    assert "left out because the step is not repeatable" in left_out
    assert [steps for steps, *_ in got] == [4, 4]


@pytest.mark.nightly
def test_what_each_rank_draws_by_itself_is_refused() -> None:
    match = "different data inside the cp group"
    expect_on_every_rank(2, fit, "Healthy", "unseeded", RING, error=ParityError, match=match)


def checked_by_hand(rank: int, world_size: int, factor: str) -> str:
    plain = module_of("Summed" if factor != "none" else "Healthy", factor)
    plain.training_step = None
    fabric = fabric_of(world_size, RING)
    fabric.launch()
    strategy: Any = fabric.strategy
    model: Any = fabric.setup(Network(plain))
    count = 0

    def step(batch: Any) -> Any:
        nonlocal count
        count += 1
        return model(batch) * 0.5**count

    line = strategy.check_parity(default_collate(modules.rows(2)), step)
    assert count == 0
    return line


@pytest.mark.nightly
def test_in_fabric() -> None:
    """What the step closes over is put back; what a global counts is not."""
    for line in run_ranks(2, checked_by_hand, "none", timeout=60):
        assert "agree on 96 tokens" in line
    match = r"cannot compare this step: the step is not repeatable.*deterministic ones\.$"
    expect_on_every_rank(2, checked_by_hand, "falling", error=ConfigError, match=match)
