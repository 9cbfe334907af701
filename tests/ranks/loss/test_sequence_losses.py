"""Losses of whole rows and documents in loops of Fabric: one process's, whatever else the loss has."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_cp.errors import BatchMismatchError, ConfigError, LightningCPError, ShapeError
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
        return x[:, more[0]] if len(more) == 1 else counted_token(x, *more)
    mask = more[0].to(x.dtype) if more else torch.ones(x.shape[:2], dtype=x.dtype)
    mask = mask.view(*mask.shape, *[1] * (x.dim() - 2))
    total = (x * mask).sum(1)
    return total if name == "sequence_sum" else total / mask.sum(1)


def counted_token(x: torch.Tensor, index: int, mask: torch.Tensor) -> torch.Tensor:
    """The token of an index among those that a mask counts; -1 is the last."""
    found = [torch.nonzero(row)[index, 0] for row in mask]
    return x[torch.arange(len(x)), torch.stack(found)]


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


def attended(loop: Loop, batch: Batch) -> torch.Tensor:
    """A regression of means by learned weights, divided by a count of a mask."""
    logits, mask = loop.logits(batch), batch["input_ids"] % 3 > 0
    means = of_whole(loop, "sequence_mean", logits[..., :4], logits[..., 4].sigmoid())
    count = of_whole(loop, "sequence_sum", mask) if loop.parallel else mask.sum(1)
    return (means.tanh() - 0.2).square().sum(1).div(count).sum()


def rewarded(loop: Loop, batch: Batch) -> torch.Tensor:
    """Of the last token, as a reward model, and of the first, as BERT's classes."""
    logits = loop.logits(batch)
    last, first = (of_whole(loop, "sequence_pick", logits, at) for at in (-1, 0))
    return -F.logsigmoid(last[0, 0] - last[1, 0]) + F.cross_entropy(first, torch.tensor([3, 5]))


def answered(loop: Loop, batch: Batch) -> torch.Tensor:
    """Of the last token of an answer, and of its third."""
    logits, mask = loop.logits(batch), batch["input_ids"] % 3 > 0
    last, third = (of_whole(loop, "sequence_pick", logits, at, mask) for at in (-1, 2))
    return -F.logsigmoid(last[0, 0] - last[1, 0]) + F.cross_entropy(third, torch.tensor([3, 5]))


def denoised(loop: Loop, batch: Batch) -> torch.Tensor:
    """As a diffusion model: a level of noise for each row, and noise for each token, as one process draws."""
    strategy: Any = loop.fabric.strategy
    x = loop.logits(batch)
    levels = torch.rand(2, 1, 1)
    noise = strategy.draw_whole(torch.randn_like, x) if loop.parallel else torch.randn_like(x)
    return of_whole(loop, "sequence_mean", (x - levels * noise).square()).mean()


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
@pytest.mark.parametrize("way", [preferences, pooled, attended, rewarded, answered, denoised])
def test_they_equal_one_process(ranks: int, settings: Settings, labels: str, way: Any) -> None:
    for got in run_ranks(ranks, trained, settings, way, labels):
        close(got, alone(way, labels))


@GRIDS
def test_beside_a_mean_over_labels(ranks: int, settings: Settings) -> None:
    for got in run_ranks(ranks, trained, settings, mixed):
        close(got, alone(mixed))


def no_label(loop: Loop, batch: Batch) -> torch.Tensor:
    """The labels of the batch are all -100, and the whole-row term counts nevertheless."""
    return loop.loss(batch).nan_to_num() + preferences(loop, batch)


def no_target(loop: Loop, batch: Batch) -> torch.Tensor:
    """The step chooses no token, and the whole-row term counts nevertheless."""
    strategy: Any = loop.fabric.strategy
    values = logps(loop, batch)
    mask = torch.zeros_like(values, dtype=torch.bool)
    count = strategy.count_targets(mask) if loop.parallel else 1
    return (values * mask).sum() / count + preferences(loop, batch)


def without_any_label(
    rank: int, world_size: int, settings: Settings | None, way: Any
) -> torch.Tensor:
    loop = Loop(world_size, None if settings is None else settings)
    try:
        for whole in loop.batches(4, use_distributed_sampler=False):
            if way is no_label:
                whole["labels"].fill_(-100)
            loop.fabric.backward(way(loop, loop.shard(whole)))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    finally:
        loop.end()
    return weights(loop.model)


@GRIDS
@pytest.mark.parametrize("way", [no_label, no_target])
def test_in_a_batch_without_any_label(ranks: int, settings: Settings, way: Any) -> None:
    (want,) = run_ranks(1, without_any_label, None, way)
    for got in run_ranks(ranks, without_any_label, settings, way):
        close(got, want)


def stepped(rank: int, world_size: int, settings: Settings, way: Any, labels: str) -> None:
    """One step, which must not change a weight."""
    loop = Loop(world_size, {"labels": labels, **settings})
    before = weights(loop.model)
    try:
        for whole in loop.batches(2, use_distributed_sampler=False):
            loop.fabric.backward(way(loop, loop.shard(whole_batch(whole, labels))))
            loop.optimizer.step()
    finally:
        loop.end()
        assert torch.equal(weights(loop.model), before)


def own_mean(loop: Loop, batch: Batch) -> torch.Tensor:
    return logps(loop, batch).mean()


def own_cross_entropy(loop: Loop, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(loop.logits(batch).flatten(0, 1), batch["input_ids"].flatten())


def beside_an_own_mean(loop: Loop, batch: Batch) -> torch.Tensor:
    return preferences(loop, batch) + 0.1 * own_mean(loop, batch)


def of_parameters(loop: Loop, batch: Batch) -> torch.Tensor:
    loop.logits(batch)
    return sum(p.square().sum() for p in loop.model.parameters())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("way", "match"),
    [
        (
            own_mean,
            r"computed from a rank's own tokens.*sequence_sum\(values\).*count_targets\(mask\)",
        ),
        (own_cross_entropy, "computed from a rank's own tokens"),
        (beside_an_own_mean, "computed from a rank's own tokens"),
        (of_parameters, "no value of whole sequences and declares no targets"),
    ],
)
@pytest.mark.quick("ring 2-own_mean*", "hybrid-of_parameters*")
@GRIDS
def test_other_losses_are_refused_without_labels(
    ranks: int, settings: Settings, way: Any, match: str
) -> None:
    expect_on_every_rank(ranks, stepped, settings, way, "none", error=ConfigError, match=match)


def by_its_value(loop: Loop, batch: Batch) -> torch.Tensor:
    """Another number on each rank, which no gradient shows: it is added."""
    return preferences(loop, batch) + torch.distributed.get_rank()


def chosen_by_itself(loop: Loop, batch: Batch) -> torch.Tensor:
    """Each rank takes another function of the same value."""
    value = preferences(loop, batch)
    return value if torch.distributed.get_rank() else value.square()


@GRIDS
@pytest.mark.parametrize("way", [by_its_value, chosen_by_itself])
@pytest.mark.quick("*-ring 3")
def test_losses_that_differ_between_ranks_are_refused(
    ranks: int, settings: Settings, way: Any
) -> None:
    match = r"step 1: the loss is .* on rank 0 and .* on rank 1, which share.*No rank has stepped"
    expect_on_every_rank(ranks, stepped, settings, way, "none", error=ConfigError, match=match)


def on_one_rank(loop: Loop, batch: Batch) -> torch.Tensor:
    values = logps(loop, batch)
    if torch.distributed.get_rank():
        return values.sum() * 0
    return of_whole(loop, "sequence_sum", values).sum()


@GRIDS
@pytest.mark.quick("ring 2", "hybrid")
def test_a_rank_that_skips_it(ranks: int, settings: Settings) -> None:
    errors = expect_on_every_rank(
        ranks, stepped, settings, on_one_rank, "none", error=LightningCPError, match=""
    )
    assert any("sequence_sum" in str(error) for error in errors)


def out_of_range(loop: Loop, batch: Batch) -> torch.Tensor:
    """On one rank only."""
    place = 99 * (torch.distributed.get_rank() == 1)
    return of_whole(loop, "sequence_pick", logps(loop, batch), place).sum()


@GRIDS
@pytest.mark.quick("ring 2", "hybrid")
def test_a_place_that_is_not_there(ranks: int, settings: Settings) -> None:
    match = r"sequence_pick\(99\) is not a token|rank 1.*sequence_pick\(99\)"
    expect_on_every_rank(
        ranks, stepped, settings, out_of_range, "none", error=LightningCPError, match=match
    )


def own_last(loop: Loop, batch: Batch) -> torch.Tensor:
    """The last token of a rank's part, as one process finds that of a row."""
    mask = torch.ones_like(batch["input_ids"])
    own = mask.sum(1) - 1 - torch.distributed.get_rank()  # another number of tokens on each rank
    return of_whole(loop, "sequence_pick", logps(loop, batch), own).sum()


def short_of_a_token(loop: Loop, batch: Batch) -> torch.Tensor:
    """Values of another width on one rank."""
    width = 5 - (torch.distributed.get_rank() == 1)
    return of_whole(loop, "sequence_sum", loop.logits(batch)[..., :width]).sum()


def narrow(loop: Loop, batch: Batch) -> torch.Tensor:
    """Values of another dtype on one rank."""
    values = logps(loop, batch)
    values = values.float() if torch.distributed.get_rank() else values
    return of_whole(loop, "sequence_mean", values).sum()


def masked_alone(name: str, loop: Loop, batch: Batch) -> torch.Tensor:
    """One rank gives a mask."""
    values = logps(loop, batch)
    masks = [values > -9] if torch.distributed.get_rank() == 1 else []
    return of_whole(loop, name, values, *masks).sum()


def picked_alone(loop: Loop, batch: Batch) -> torch.Tensor:
    values = logps(loop, batch)
    masks = [values > -9] if torch.distributed.get_rank() == 1 else []
    return of_whole(loop, "sequence_pick", values, -1, *masks).sum()


def weighted_alone(loop: Loop, batch: Batch) -> torch.Tensor:
    """One rank gives weights, the others a mask: sums of other dtypes."""
    values = logps(loop, batch).float()
    mask = (values > -9).to(torch.float64 if torch.distributed.get_rank() == 1 else torch.bool)
    return of_whole(loop, "sequence_mean", values, mask).sum()


def without_a_gradient(loop: Loop, batch: Batch) -> torch.Tensor:
    """Other ranks would wait for this one in backward."""
    values = logps(loop, batch)
    values = values.detach() if torch.distributed.get_rank() == 1 else values
    sums = of_whole(loop, "sequence_sum", values)
    return (sums + 0 * preferences(loop, batch)).sum()


SAME = r"ranks that share one sample disagree on {} \(rank 0: {}, rank 1: {}.*Give all of them"


@GRIDS
@pytest.mark.parametrize(
    ("way", "match"),
    [
        (own_last, SAME.format("the index of row 0", r"\d+", r"\d+") + ".*-1 is the last token"),
        (short_of_a_token, SAME.format("values", r"float64 \[2, \d+, 5\]", r".*, 4\]")),
        (narrow, SAME.format("values", r"float64 \[2, \d+\]", r"float32 \[2, \d+\]")),
        (partial(masked_alone, "sequence_sum"), SAME.format("a mask", None, "bool")),
        (picked_alone, "ranks are not at the same call .*rank 1: a mask of sequence_pick"),
        (partial(masked_alone, "sequence_mean"), SAME.format("a mask", None, "bool")),
        (weighted_alone, SAME.format("a mask", "bool", "float64")),
        (without_a_gradient, SAME.format("a gradient", True, False)),
    ],
    ids=[
        "own index",
        "width",
        "dtype",
        "mask of a sum",
        "mask of a pick",
        "mask of a mean",
        "weights",
        "gradient",
    ],
)
@pytest.mark.quick("own index-ring 3", "width-ring 2", "mask of a mean-ulysses 2")
def test_arguments_that_differ_between_ranks(
    ranks: int, settings: Settings, way: Any, match: str
) -> None:
    options: dict[str, Any] = {"error": BatchMismatchError, "match": match}
    expect_on_every_rank(ranks, stepped, settings, way, "none", **options)


def at_padding(loop: Loop, batch: Batch) -> torch.Tensor:
    """The second row has 20 tokens."""
    return of_whole(loop, "sequence_pick", logps(loop, batch), torch.tensor([28, 20])).sum()


def before_the_first(loop: Loop, batch: Batch) -> torch.Tensor:
    return of_whole(loop, "sequence_pick", logps(loop, batch), -2).sum()


def short_mask(loop: Loop, batch: Batch) -> torch.Tensor:
    """As of shifted values."""
    values = logps(loop, batch)
    return of_whole(loop, "sequence_sum", values, torch.ones_like(values)[:, 1:]).sum()


def whole_mask(loop: Loop, batch: Batch) -> torch.Tensor:
    """The mask of the batch before it was sharded, on one rank."""
    values = logps(loop, batch)
    length = 29 if torch.distributed.get_rank() else values.shape[1]
    return of_whole(loop, "sequence_mean", values, torch.ones(2, length)).sum()


def whole_mask_of_a_pick(loop: Loop, batch: Batch) -> torch.Tensor:
    """On one rank."""
    values = logps(loop, batch)
    length = 29 if torch.distributed.get_rank() else values.shape[1]
    return of_whole(loop, "sequence_pick", values, -1, torch.ones(2, length)).sum()


def beyond_a_mask(loop: Loop, batch: Batch) -> torch.Tensor:
    """The second row has 20 tokens, whatever the mask counts."""
    values = logps(loop, batch)
    places = torch.tensor([28, 20])
    return of_whole(loop, "sequence_pick", values, places, torch.ones_like(values)).sum()


def of_an_empty_mask(loop: Loop, batch: Batch) -> torch.Tensor:
    values = logps(loop, batch)
    return of_whole(loop, "sequence_pick", values, -1, torch.zeros_like(values)).sum()


def by_a_list(loop: Loop, batch: Batch) -> torch.Tensor:
    strategy: Any = loop.fabric.strategy
    return logps(loop, batch).sum() / strategy.count_targets([1, 2])


def drawn_in_another_shape(loop: Loop, batch: Batch) -> torch.Tensor:
    strategy: Any = loop.fabric.strategy
    return (
        logps(loop, batch) * strategy.draw_whole(lambda _: torch.randn(3), batch["input_ids"])
    ).sum()


def too_few_places(loop: Loop, batch: Batch) -> torch.Tensor:
    return of_whole(loop, "sequence_pick", logps(loop, batch), torch.tensor([1])).sum()


def padded(rank: int, world_size: int, settings: Settings, way: Any) -> None:
    loop = Loop(world_size, {**NONE, **settings})
    before = weights(loop.model)
    try:
        ids = torch.randint(0, 48, (2, 29), generator=torch.Generator().manual_seed(1))
        mask = (torch.arange(29) < torch.tensor([[29], [20]])).long()
        loss = way(loop, loop.shard({"input_ids": ids, "attention_mask": mask}))
        loop.fabric.backward(loss)
        loop.optimizer.step()
    finally:
        loop.end()
        assert torch.equal(weights(loop.model), before)


@pytest.mark.quick("*-ring 2", "at_padding-*")
@GRIDS
@pytest.mark.parametrize(
    ("way", "match"),
    [
        (at_padding, r"sequence_pick\(20\) is not a token of row 1, which has 20 without padding"),
        (before_the_first, r"sequence_pick\(-2\) is not a token of row 0.*or -1 for the last"),
        (short_mask, r"mask takes values .*this rank's tokens.*shifted before sharding"),
        (whole_mask, r"mask takes values .*this rank's tokens.*got \(2, 29\).*before unshard"),
        (whole_mask_of_a_pick, r"mask takes values .*this rank's tokens.*got \(2, 29\)"),
        (beyond_a_mask, r"sequence_pick\(20\) is not a token of row 1, which has 20 without"),
        (of_an_empty_mask, r"sequence_pick finds no token in row 0.*Give a mask"),
        (by_a_list, r"count_targets\(a list\) declares no number of targets.*Pass a mask"),
        (drawn_in_another_shape, r"draw_whole gave its function a tensor \[2, 29\], and got \[3\]"),
        (too_few_places, r"needs one index for each row, of which there are 2, got 1"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_bad_arguments(ranks: int, settings: Settings, way: Any, match: str) -> None:
    options: dict[str, Any] = {"error": LightningCPError, "match": match}
    expect_on_every_rank(ranks, padded, settings, way, **options)


def test_targets_of_equal_weight_and_whole_rows_do_not_mix() -> None:
    match = "would be weighted by the tokens of its rows.*token_weighting='micro_batch'"
    settings = {**RING, "token_weighting": "global"}
    expect_on_every_rank(2, stepped, settings, mixed, "aligned", error=ConfigError, match=match)


def of_other_rows(rank: int, world_size: int, rows: int) -> torch.Tensor:
    """A value of all data ranks' rows, of which the second has ``rows``."""
    loop = Loop(world_size, {**RING, "labels": "none", "data_parallel_size": 2})
    strategy: Any = loop.fabric.strategy
    try:
        ids = torch.randint(0, 48, (rows if rank > 1 else 2, 29))
        local = strategy.shard_batch({"input_ids": ids}, training=True)
        ones = torch.ones_like(local["input_ids"]).double()
        return strategy.gather_data(strategy.sequence_sum(ones))
    finally:
        loop.end()


def test_rows_of_all_data_ranks() -> None:
    for got in run_ranks(4, of_other_rows, 2):
        assert got.tolist() == [29] * 4
    match = (
        r"gather_data was given \(\d,\) of torch.float64 without a.*Give as many rows on every rank"
    )
    expect_on_every_rank(4, of_other_rows, 3, error=ShapeError, match=match)


def on_one_device(rank: int, world_size: int) -> None:
    """The padding of a batch is known there, too."""
    loop = Loop(1, {"labels": "none", "context_parallel_size": 1})
    strategy: Any = loop.fabric.strategy
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    labels = torch.tensor([1, 0])  # of rows
    whole = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    strategy.shard_batch(whole, training=True)
    assert strategy.sequence_pick(ids, -1).tolist() == [3, 11]
    assert strategy.sequence_sum(ids.double()).tolist() == [6, 45]
    packed = {"input_ids": ids, "segment_ids": torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6])}
    strategy.shard_batch(packed, training=True)
    assert strategy.sequence_sum(ids.double()).tolist() == [1, 9, 5, 51]
    loop.end()


def test_on_one_device() -> None:
    run_ranks(1, on_one_device)


def labelled(rank: int, world_size: int) -> None:
    loop = Loop(world_size, {**RING, **NONE})
    try:
        for whole in loop.batches(2, use_distributed_sampler=False):
            loop.shard(whole)
    finally:
        loop.end()


def test_labels_of_tokens_beside_labels_none() -> None:
    match = r"labels='none' says that the batch has no labels of tokens, but 'labels' of shape \(2, 29\)"
    expect_on_every_rank(2, labelled, error=ConfigError, match=match)
