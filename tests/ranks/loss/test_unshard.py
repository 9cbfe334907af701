"""``unshard`` with values that do not fit the step or the other ranks: an error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp.errors import BatchMismatchError, LightningCPError
from tests.helpers.pool import expect_on_every_rank
from tests.helpers.strategies.small import LET_EMPTY, Batch, Settings
from tests.ranks.loss.test_sequence_losses import GRIDS, SAME, logps, stepped
from tests.ranks.strategies.test_fabric import Loop

pytestmark = LET_EMPTY


def unshard(loop: Loop, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    strategy: Any = loop.fabric.strategy
    return strategy.unshard(x, dim).sum()


def is_second() -> bool:
    return torch.distributed.get_rank() == 1


def of_other_width(loop: Loop, batch: Batch) -> torch.Tensor:
    return unshard(loop, loop.logits(batch)[..., : 5 - is_second()])


def of_other_dtype(loop: Loop, batch: Batch) -> torch.Tensor:
    values = logps(loop, batch)
    return unshard(loop, values.float() if is_second() else values)


def of_other_dim(loop: Loop, batch: Batch) -> torch.Tensor:
    """The values are [2, L, L]."""
    values = logps(loop, batch)
    return unshard(loop, values[:, :, None] * values[:, None], 2 if is_second() else 1)


def without_a_gradient(loop: Loop, batch: Batch) -> torch.Tensor:
    """Other ranks would wait for this one in backward."""
    values = logps(loop, batch)
    return unshard(loop, values.detach() if is_second() else values) + 0 * values.sum()


@GRIDS
@pytest.mark.parametrize(
    ("way", "match"),
    [
        (of_other_width, SAME.format("values", r"float64 \[2, \d+, 5\]", r".*, 4\]")),
        (of_other_dtype, SAME.format("values", r"float64 \[2, \d+\]", r"float32 \[2, \d+\]")),
        (of_other_dim, SAME.format("a dimension", 1, 2)),
        (without_a_gradient, SAME.format("a gradient", True, False)),
    ],
    ids=["width", "dtype", "dimension", "gradient"],
)
@pytest.mark.quick("width-ring 3", "dimension-ring 2", "gradient-ring 2", "dtype-hybrid")
def test_values_that_differ_between_ranks(
    ranks: int, settings: Settings, way: Any, match: str
) -> None:
    options: dict[str, Any] = {"error": BatchMismatchError, "match": match}
    expect_on_every_rank(ranks, stepped, settings, way, "none", **options)


def on_one_rank(loop: Loop, batch: Batch) -> torch.Tensor:
    values = logps(loop, batch)
    return values.sum() * 0 if is_second() else unshard(loop, values)


@GRIDS
@pytest.mark.quick("ring 2", "hybrid")
def test_a_rank_that_skips_it(ranks: int, settings: Settings) -> None:
    errors = expect_on_every_rank(
        ranks, stepped, settings, on_one_rank, "none", error=LightningCPError, match=""
    )
    assert any("unshard" in str(error) for error in errors)


def of_some_tokens(loop: Loop, batch: Batch) -> torch.Tensor:
    """Another number of tokens on one rank, as a mask selects them."""
    values = logps(loop, batch)
    return unshard(loop, values[:, 1:] if is_second() else values)


@GRIDS
@pytest.mark.quick("ring 2", "ulysses 2")
def test_values_of_some_tokens(ranks: int, settings: Settings) -> None:
    match = r"unshard expects a local shard, \d+ entries along dim 1, got shape \(2, \d+\)"
    expect_on_every_rank(
        ranks, stepped, settings, of_some_tokens, "none", error=LightningCPError, match=match
    )
