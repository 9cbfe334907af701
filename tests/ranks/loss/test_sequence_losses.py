"""Losses of whole rows and documents in loops of Fabric: one process's, whatever else the loss has."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_cp.errors import BatchMismatchError, ConfigError, LightningCPError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    LET_EMPTY,
    RING,
    RING3,
    ULYSSES,
    Batch,
    Settings,
    close,
    weights,
)
from tests.ranks.loss.test_loss_kinds import token_losses
from tests.ranks.strategies.test_fabric import Loop

pytestmark = LET_EMPTY

GRIDS = pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (3, RING3), (2, ULYSSES), (4, HYBRID)],
    ids=["ring 2", "ring 3", "ulysses 2", "hybrid"],
)
NONE: Settings = {"labels": "none"}


def of_whole(loop: Loop, name: str, x: torch.Tensor, *more: Any) -> torch.Tensor:
    """A value of whole rows; in one process by its definition."""
    strategy: Any = loop.fabric.strategy
    if loop.parallel:
        return getattr(strategy, name)(x, *more)
    if name == "sequence_pick":
        return x[:, more[0]]
    mask = more[0].to(x.dtype) if more else torch.ones(x.shape[:2], dtype=x.dtype)
    mask = mask.view(*mask.shape, *[1] * (x.dim() - 2))
    total = (x * mask).sum(1)
    return total if name == "sequence_sum" else total / mask.sum(1)


def logps(loop: Loop, batch: Batch) -> torch.Tensor:
    """[B, L]: of each token's own id, which needs no labels."""
    logits = loop.logits(batch).log_softmax(-1)
    return logits.gather(-1, batch["input_ids"][..., None]).squeeze(-1)


def preferences(loop: Loop, batch: Batch) -> torch.Tensor:
    """As DPO."""
    chosen, rejected = of_whole(loop, "sequence_sum", logps(loop, batch))
    return -F.logsigmoid(0.1 * (chosen - rejected) + 0.3)


def pooled(loop: Loop, batch: Batch) -> torch.Tensor:
    """A regression of means over some tokens."""
    mask = batch["input_ids"] % 3 > 0
    means = of_whole(loop, "sequence_mean", loop.logits(batch), mask)
    return (means[:, :4].tanh() - 0.2).square().mean()


def rewarded(loop: Loop, batch: Batch) -> torch.Tensor:
    """Of the last token, as a reward model, and of the first, as BERT's classes."""
    logits = loop.logits(batch)
    last, first = (of_whole(loop, "sequence_pick", logits, at) for at in (-1, 0))
    return -F.logsigmoid(last[0, 0] - last[1, 0]) + F.cross_entropy(first, torch.tensor([3, 5]))


def mixed(loop: Loop, batch: Batch) -> torch.Tensor:
    """A language model's loss, and a term of whole rows."""
    return loop.loss(batch) + 0.3 * preferences(loop, batch)


def whole_batch(batch: Batch, labels: str) -> Batch:
    return {"input_ids": batch["input_ids"]} if labels == "none" else batch


def trained(
    rank: int, world_size: int, settings: Settings | None, way: Any, labels: str = "aligned"
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Four steps; in one of them most ranks have no label."""
    loop = Loop(world_size, None if settings is None else {"labels": labels, **settings})
    losses: list[torch.Tensor] = []
    try:
        for whole in loop.batches(8, use_distributed_sampler=False):
            loss = way(loop, loop.shard(whole_batch(whole, labels)))
            loop.fabric.backward(loss)
            losses.append(loop.shown(loss))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    finally:
        loop.end()
    return losses, weights(loop.model)


@lru_cache(maxsize=8)
def alone(way: Any, labels: str = "aligned") -> Any:
    return run_ranks(1, trained, None, way, labels)[0]


@pytest.mark.pairwise
@GRIDS
@pytest.mark.parametrize("labels", ["aligned", "none"])
@pytest.mark.parametrize("way", [preferences, pooled, rewarded])
def test_they_equal_one_process(ranks: int, settings: Settings, labels: str, way: Any) -> None:
    for got in run_ranks(ranks, trained, settings, way, labels):
        close(got, alone(way, labels))


@GRIDS
def test_beside_a_mean_over_labels(ranks: int, settings: Settings) -> None:
    for got in run_ranks(ranks, trained, settings, mixed):
        close(got, alone(mixed))
