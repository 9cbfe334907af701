"""Losses of whole rows beside something of a rank's own: compared before they are weighted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp.errors import ConfigError, LightningCPError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import LET_EMPTY, RING, RING3, Batch, Settings, close, weights
from tests.ranks.loss.test_sequence_losses import (
    GRIDS,
    NONE,
    alone,
    logps,
    of_whole,
    padded,
    trained,
)
from tests.ranks.strategies.test_fabric import Loop

pytestmark = LET_EMPTY


def chosen(loop: Loop, batch: Batch) -> torch.Tensor:
    """bool [B, L]: the tokens that a step chooses, without padding."""
    mask = batch["input_ids"] % 3 > 0
    strategy: Any = loop.fabric.strategy
    return mask & strategy.token_mask(mask) if loop.parallel else mask


def count(loop: Loop, mask: torch.Tensor) -> torch.Tensor:
    strategy: Any = loop.fabric.strategy
    return strategy.count_targets(mask) if loop.parallel else mask.sum()


def by_its_own_count(loop: Loop, batch: Batch) -> torch.Tensor:
    """A sum over whole rows, divided by the number of a rank's tokens."""
    mask = chosen(loop, batch)
    return of_whole(loop, "sequence_sum", logps(loop, batch), mask).sum() / mask.sum()


def beside_labels(loop: Loop, batch: Batch) -> torch.Tensor:
    return loop.loss(batch).nan_to_num() + by_its_own_count(loop, batch)


def beside_counted(loop: Loop, batch: Batch) -> torch.Tensor:
    values, mask = logps(loop, batch), chosen(loop, batch)
    return (values * mask).sum() / count(loop, mask) + by_its_own_count(loop, batch)


def scaled(loop: Loop, batch: Batch) -> torch.Tensor:
    """The counted mean is multiplied by a parameter, which is no value of whole rows."""
    values, mask = logps(loop, batch), chosen(loop, batch)
    scale = next(loop.model.parameters()).square().mean()
    return (values * mask).sum() / count(loop, mask) * scale + by_its_own_count(loop, batch)


def beside_scaled_parameters(loop: Loop, batch: Batch) -> torch.Tensor:
    """A regulariser times the share of a rank's chosen tokens."""
    values, mask = logps(loop, batch), chosen(loop, batch)
    weight = next(loop.model.parameters()).square().sum()
    return (values * mask).sum() / count(loop, mask) + 0.1 * mask.double().mean() * weight


def beside_summed_parameters(loop: Loop, batch: Batch) -> torch.Tensor:
    """A regulariser in Python's sum, which starts with 0, divided by the count of the tokens."""
    values, mask = logps(loop, batch), chosen(loop, batch)
    return ((values * mask).sum() + sum(p.square().sum() for p in loop.model.parameters())) / count(
        loop, mask
    )


def labelled(rank: int, world_size: int, settings: Settings, way: Any, labels: int) -> None:
    """One step, of a batch whose labels are the first ones of each row; it must not change a weight."""
    loop = Loop(world_size, settings)
    before = weights(loop.model)
    try:
        for whole in loop.batches(2, use_distributed_sampler=False):
            whole["labels"][:] = -100
            whole["labels"][:, :labels] = whole["input_ids"][:, :labels]
            loop.fabric.backward(way(loop, loop.shard(whole)))
            loop.optimizer.step()
    finally:
        loop.end()
        assert torch.equal(weights(loop.model), before)


@GRIDS
@pytest.mark.parametrize(
    "way",
    [beside_labels, beside_counted, beside_scaled_parameters, beside_summed_parameters, scaled],
)
@pytest.mark.parametrize("labels", [0, 2], ids=["no label", "labels on one rank"])
@pytest.mark.quick(
    "no label-beside_labels-ring 2",
    "*one rank-beside_labels-ring 3",
    "no*_counted-hybrid",
    "no label-scaled-ring 2",
    "no label-beside_s*_parameters-ring 2",
)
def test_a_rank_s_own_count_is_refused(
    ranks: int, settings: Settings, way: Any, labels: int
) -> None:
    match = r"sequences or parameters with something.*on rank 0 and.*sequence_sum.*not known what"
    expect_on_every_rank(ranks, labelled, settings, way, labels, error=ConfigError, match=match)


def gathered(loop: Loop, batch: Batch) -> torch.Tensor:
    """Rows of all data ranks, each divided by the number of a rank's tokens."""
    values, mask = logps(loop, batch), chosen(loop, batch)
    strategy: Any = loop.fabric.strategy
    rows = strategy.gather_data(of_whole(loop, "sequence_sum", values, mask) / mask.sum())
    return loop.loss(batch).nan_to_num() + rows.logsumexp(0)


def test_a_rank_s_own_count_in_rows_of_all_data_ranks_is_refused() -> None:
    settings = {**RING, "data_parallel_size": 2}
    match = r"sequences or parameters with something.*on rank \d and.*sequence_sum"
    expect_on_every_rank(4, labelled, settings, gathered, 2, error=ConfigError, match=match)


def spread(loop: Loop, batch: Batch) -> torch.Tensor:
    """A variance and a mean: the mean also acts through the values that the variance is of."""
    values = logps(loop, batch)
    mean = of_whole(loop, "sequence_mean", values)
    return of_whole(loop, "sequence_mean", (values - mean[:, None]).square()).mean() + mean.mean()


def pooled_by_attention(loop: Loop, batch: Batch) -> torch.Tensor:
    values = logps(loop, batch)
    total = of_whole(loop, "sequence_sum", values.exp())
    share = values.exp() / total[:, None]
    pooled = of_whole(loop, "sequence_sum", share * values.tanh())
    return pooled.mean() + 0.1 * total.log().square().mean()


def gated(loop: Loop, batch: Batch) -> torch.Tensor:
    """Values of rows act in a mean over tokens, and beside it."""
    values, mask = logps(loop, batch), chosen(loop, batch)
    mean = of_whole(loop, "sequence_mean", values)
    gate = mean.sigmoid()[:, None]
    return -(values * gate * mask).sum() / count(loop, mask) + mean.tanh().mean()


def multiplied(loop: Loop, batch: Batch) -> torch.Tensor:
    """A counted mean times a value of whole rows: ranks differ in the derivative, and are right."""
    values, mask = logps(loop, batch), chosen(loop, batch)
    of_rows = of_whole(loop, "sequence_mean", values).mean().sigmoid()
    return (values * mask).sum() / count(loop, mask) * of_rows


class Squares(torch.autograd.Function):
    """A user's own function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


def by_an_own_function(loop: Loop, batch: Batch) -> torch.Tensor:
    first, second = of_whole(loop, "sequence_mean", logps(loop, batch)).unbind()
    return loop.loss(batch).nan_to_num() + Squares.apply(first - second + 0.3)  # type: ignore[no-any-return]


def times_no_target(loop: Loop, batch: Batch) -> torch.Tensor:
    """A rank without targets takes its whole loss times 0, which is right, as its weight is 0."""
    loss = loop.loss(batch).nan_to_num() + of_whole(loop, "sequence_mean", logps(loop, batch)).sum()
    return loss * float((batch["labels"] != -100).any())


@GRIDS
@pytest.mark.parametrize(
    "way", [spread, pooled_by_attention, gated, multiplied, by_an_own_function, times_no_target]
)
@pytest.mark.quick(
    "spread-ring 3", "pooled*-hybrid", "multiplied-ring 2", "by_an*-ulysses 2", "times*-ring 3"
)
def test_they_equal_one_process(ranks: int, settings: Settings, way: Any) -> None:
    for got in run_ranks(ranks, trained, settings, way):
        close(got, alone(way))


def near_its_start(loop: Loop, batch: Batch) -> torch.Tensor:
    """Two paths to a value of whole rows, in float32, nearly cancel: no rounding of weights is between."""
    mean = of_whole(loop, "sequence_mean", logps(loop, batch).float())
    apart = mean.detach() + torch.tensor([1e-5, -6e-6]) - mean
    return loop.loss(batch) + 0.5 * (apart.exp() - apart - 1).mean()


@GRIDS
@pytest.mark.quick("ring 3")
def test_rounding_of_small_derivatives_is_no_difference(ranks: int, settings: Settings) -> None:
    losses, changed = alone(near_its_start)
    for got, own in run_ranks(ranks, trained, settings, near_its_start):
        torch.testing.assert_close(got, losses, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(own, changed, rtol=1e-6, atol=1e-7)


def by_a_near_count(loop: Loop, batch: Batch) -> torch.Tensor:
    """In bfloat16, divided by 100 and by 101."""
    values = of_whole(loop, "sequence_sum", logps(loop, batch).bfloat16())
    return loop.loss(batch) + 0.1 * values.sum() / torch.tensor(100 + torch.distributed.get_rank())


@GRIDS
@pytest.mark.quick("ring 2")
def test_near_counts_are_refused_in_bfloat16(ranks: int, settings: Settings) -> None:
    match = "sequences or parameters with something"
    expect_on_every_rank(
        ranks, labelled, settings, by_a_near_count, 29, error=ConfigError, match=match
    )


def of_padded_packs(rank: int, world_size: int, settings: Settings) -> list[list[float]]:
    """Values of documents, in packs that end with a document of padding."""
    batch = {
        "input_ids": torch.arange(1, 41).view(2, 20),
        "segment_ids": torch.tensor([[1] * 8 + [2] * 9 + [0] * 3, [1] * 17 + [0] * 3]),
        "attention_mask": (torch.arange(20) < 17).long().repeat(2, 1),
    }
    loop = Loop(world_size, {**NONE, **settings})
    strategy: Any = loop.fabric.strategy
    try:
        ids = strategy.shard_batch(batch, training=True)["input_ids"]
        x, mask = ids.double(), strategy.token_mask(ids)
        found = [
            strategy.sequence_sum(torch.ones_like(x)),
            strategy.sequence_mean(x, mask),
            strategy.sequence_pick(x, -1),
            strategy.sequence_pick(x, 1, ids % 2 == 0),
        ]
        return [value.tolist() for value in found]
    finally:
        loop.end()


@GRIDS
@pytest.mark.quick("ring 2", "hybrid")
def test_a_document_of_padding_is_no_sequence(ranks: int, settings: Settings) -> None:
    for got in run_ranks(ranks, of_padded_packs, settings):
        assert got == [[8, 9, 17], [4.5, 13, 29], [8, 17, 37], [4, 12, 24]]


def by_a_float(loop: Loop, batch: Batch) -> torch.Tensor:
    return of_whole(loop, "sequence_pick", logps(loop, batch), torch.tensor([3.0, 4.0])).sum()


def test_an_index_is_a_whole_number() -> None:
    match = r"sequence_pick needs whole numbers as indices, got \[3.0, 4.0\]"
    expect_on_every_rank(2, padded, {}, by_a_float, error=LightningCPError, match=match)


def rows_in_tokens(loop: Loop, batch: Batch, share: torch.Tensor | float = 1.0) -> torch.Tensor:
    """As GSPO with a mean over tokens: the clipped ratio of a row counts for each of its chosen tokens."""
    mask, mean = chosen(loop, batch), of_whole(loop, "sequence_mean", logps(loop, batch))
    ratios, gains = (mean - mean.detach()).exp(), torch.tensor([0.7, -0.4], dtype=mean.dtype)
    least = torch.minimum(ratios * gains, ratios.clamp(0.8, 1.2) * gains) * share
    return -(least[:, None] * mask).sum() / count(loop, mask)


def rows_in_chosen_tokens(loop: Loop, batch: Batch) -> torch.Tensor:
    """The same by other operators, beside a term of tokens and one of rows."""
    values, mask = logps(loop, batch), chosen(loop, batch)
    mean = of_whole(loop, "sequence_mean", values)
    of_tokens = mean.exp()[:, None].expand_as(values).where(mask, 0)
    of_rows = 0.1 * mean.square().mean()
    return (of_tokens - values * mask).sum() / count(loop, mask) + of_rows


def rows_in_a_mean(loop: Loop, batch: Batch) -> torch.Tensor:
    """A row's value in each of its chosen tokens, whose mean PyTorch takes."""
    values, mask = logps(loop, batch), chosen(loop, batch)
    count(loop, mask)
    rows = of_whole(loop, "sequence_mean", values).exp()
    return (rows[:, None].expand_as(values) * values.detach().exp())[mask].mean()


def times_rows(loop: Loop, batch: Batch) -> torch.Tensor:
    """A model's loss, weighted by a value of whole rows, beside a term of it."""
    mean = of_whole(loop, "sequence_mean", logps(loop, batch)).mean()
    return loop.loss(batch).nan_to_num() * mean.exp() + 0.2 * mean.square()


@pytest.mark.parametrize("way", [rows_in_tokens, rows_in_chosen_tokens, rows_in_a_mean, times_rows])
@GRIDS
@pytest.mark.quick("*-rows_in_tokens", "ring 3-rows_in_chosen*", "hybrid-times_rows", "ring 2-*")
def test_products_of_rows_and_tokens(ranks: int, settings: Settings, way: Any) -> None:
    labels = "aligned" if way is times_rows else "none"
    for got in run_ranks(ranks, trained, settings, way, labels):
        close(got, alone(way, labels))


def own_rows_in_tokens(loop: Loop, batch: Batch) -> torch.Tensor:
    return rows_in_tokens(loop, batch, chosen(loop, batch).double().mean())


def times_own_rows(loop: Loop, batch: Batch) -> torch.Tensor:
    share = chosen(loop, batch).double().mean()
    return loop.loss(batch) * (of_whole(loop, "sequence_mean", logps(loop, batch)) * share).mean()


@pytest.mark.parametrize("way", [own_rows_in_tokens, times_own_rows])
@pytest.mark.parametrize(("ranks", "settings"), [(2, RING), (3, RING3)], ids=["2", "3"])
def test_a_rank_s_own_number_within_products_is_refused(
    ranks: int, settings: Settings, way: Any
) -> None:
    match = r"sequences or parameters with something.*on rank 0 and.*sequence_sum.*not known what"
    expect_on_every_rank(ranks, labelled, settings, way, 20, error=ConfigError, match=match)
