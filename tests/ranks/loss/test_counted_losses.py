"""Losses with a declared count: sums divided by it, or refused before a weight changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import LET_EMPTY, RING, Batch, Settings, close
from tests.ranks.loss.test_sequence_losses import GRIDS, alone, logps, trained
from tests.ranks.loss.test_whole_values import chosen, count, labelled
from tests.ranks.strategies.test_fabric import Loop

pytestmark = LET_EMPTY

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of values [B, L], a mask [B, L], its declared count and a parameter."""

WRONG: dict[str, Way] = {
    "another divisor": lambda x, mask, n, p: (x * mask).sum() / mask.numel(),
    "root": lambda x, mask, n, p: ((x * x * mask).sum() / n).sqrt(),
    "exponential": lambda x, mask, n, p: (-(x * mask).sum() / n).exp(),
    "focal of the mean": lambda x, mask, n, p: (
        (1 - (x[mask].sum() / n).exp()) ** 2 * x[mask].sum() / n
    ),
    "means of rows": lambda x, mask, n, p: (
        (x * mask).sum(1) / mask.sum(1).clamp(min=1) * torch.tensor([0.3, 0.7])
    ).sum(),
    "mean over all tokens": lambda x, mask, n, p: (x * mask).sum() / n + 0.1 * x.square().mean(),
    "two counts": lambda x, mask, n, p: x[mask].sum() / n + x[:, 1:][mask[:, 1:]].mean(),
    "cross-entropy of others": lambda x, mask, n, p: (x * mask).sum() / n + F.mse_loss(x, x * 0),
    "norm": lambda x, mask, n, p: torch.linalg.vector_norm(x * mask) / n,
    "maximum": lambda x, mask, n, p: (x * mask).max() / n,
}

FEATURES = torch.linspace(0.01, 0.05, 31, dtype=torch.float64)
"""More than the tokens of a rank."""

RIGHT: dict[str, Way] = {
    "mean of chosen": lambda x, mask, n, p: x[mask].mean(),
    "rows in a loop": lambda x, mask, n, p: (
        sum((row[of_row].sum() for row, of_row in zip(x, mask, strict=True)), torch.zeros(())) / n
    ),
    "chunks": lambda x, mask, n, p: (
        torch.stack([y.sum() for y in (x * mask).split(3, 1)]).sum() / n
    ),
    "dot": lambda x, mask, n, p: x.flatten() @ mask.flatten().to(x) / n,
    "mean over all, times all": lambda x, mask, n, p: (x * mask).mean() * (mask.numel() / n),
    "sum of squares": lambda x, mask, n, p: F.mse_loss(x * mask, x * 0, reduction="sum") / n,
    "beside a regulariser": lambda x, mask, n, p: (x * mask).sum() / n + 0.1 * p.square().sum(),
    "learned factor": lambda x, mask, n, p: (x * mask).sum() / n * p.square().mean().exp(),
    "vector": lambda x, mask, n, p: (
        (x[..., None].exp() * mask[..., None] * FEATURES).sum((0, 1)) / n @ FEATURES.sqrt()
    ),
    "two terms": lambda x, mask, n, p: 0.5 * (x.exp() * mask).sum() / n - (x * mask).sum() / n,
    "weights of rows": lambda x, mask, n, p: (
        (x * mask).sum(1) @ torch.tensor([0.3, 0.7], dtype=x.dtype) / n
    ),
}


def counted(loop: Loop, batch: Batch, way: str) -> torch.Tensor:
    """A loss with a declared count."""
    strategy: Any = loop.fabric.strategy
    values, mask = logps(loop, batch), chosen(loop, batch)
    if loop.parallel:
        values = values * strategy.token_mask(values)
    parameter = next(loop.model.parameters())
    return (WRONG | RIGHT)[way](values, mask, count(loop, mask), parameter)


@GRIDS
@pytest.mark.parametrize("way", WRONG)
@pytest.mark.quick(
    *("another divisor-ring 2", "root-ring 2", "norm-ring 2", "root-ring 3", "means of rows-hybrid")
)
def test_other_functions_of_tokens_are_refused(ranks: int, settings: Settings, way: str) -> None:
    match = r"count_targets.*fabric\.strategy\.check_parity"
    if way not in ("norm", "maximum"):
        match = r"tokens of its loss do not weigh the same.*on rank 0 and.*" + match
    loss = partial(counted, way=way)
    expect_on_every_rank(ranks, labelled, settings, loss, 2, error=ConfigError, match=match)


def of_opposite_signs(loop: Loop, batch: Batch) -> torch.Tensor:
    mask = chosen(loop, batch)
    mean = (logps(loop, batch) * mask).sum() / count(loop, mask)
    return mean * (1 - 2 * loop.fabric.global_rank)


def test_signs_are_compared() -> None:
    match = "times the declared count, is 1 on rank 0 and -1 on rank 1"
    expect_on_every_rank(2, labelled, RING, of_opposite_signs, 2, error=ConfigError, match=match)


@GRIDS
@pytest.mark.parametrize("way", RIGHT)
@pytest.mark.quick(
    *(
        "rows in a loop-ring 3",
        "vector-ring 2",
        "two terms-hybrid",
        "mean over all*-ring 2",
        "beside*-ring 2",
        "dot-ulysses 2",
    )
)
def test_sums_divided_by_the_count_equal_one_process(
    ranks: int, settings: Settings, way: str
) -> None:
    loss = partial(counted, way=way)
    for got in run_ranks(ranks, trained, settings, loss):
        close(got, alone(loss))


def refused_and_right(rank: int, world_size: int, settings: Settings) -> None:
    """Losses that are refused before the step and at their backward, and then a right one."""
    loop = Loop(world_size, {**settings, "labels": "aligned"})
    (whole,) = loop.batches(2, use_distributed_sampler=False)
    own = torch.tensor(1.0 + rank)
    try:
        batch = loop.shard(dict(whole))
        logits, labels = loop.logits(batch), batch["labels"]
        loop.fabric.backward(F.cross_entropy(logits[:, :9].flatten(0, 1), labels[:, :9].flatten()))
        with pytest.raises(ConfigError, match="counted other targets"):
            loop.optimizer.step()
        with pytest.raises(ConfigError, match="not known what this loss is a mean over"):
            loop.fabric.backward(logps(loop, loop.shard(dict(whole))).mean().exp() * own)
        loop.fabric.backward(loop.loss(loop.shard(dict(whole))))
        loop.optimizer.step()
    finally:
        loop.end()


def test_a_refused_loss_leaves_nothing() -> None:
    run_ranks(2, refused_and_right, RING)
