"""Padding that the strategy adds neither counts nor trains: it is left out, or refused before a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError, LightningCPError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    LENGTH,
    LET_EMPTY,
    RING,
    RING3,
    ULYSSES,
    Batch,
    Settings,
    Small,
    close,
    loader,
    trainer_of,
)
from tests.helpers.strategies.small import alone as alone_in_process
from tests.ranks.loss.test_counts import OFF, Masked, refused, trained
from tests.ranks.strategies.test_fabric import Loop

pytestmark = LET_EMPTY
Way = Callable[[Masked, Batch, torch.Tensor], torch.Tensor]


def even(batch: Batch) -> torch.Tensor:
    """A mask made of inputs: it is true on padding, which has token 0."""
    return batch["input_ids"] % 2 == 0


def of_inputs(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """[B, L]: each token is its own target, on padding too."""
    ids = batch["input_ids"]
    return F.cross_entropy(logits, ids.flatten(), reduction="none").view(ids.shape)


def by_hand(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    masked = even(batch) & module.token_mask(batch["input_ids"])
    return (of_inputs(batch, logits) * masked).sum() / module.count_targets(masked)


def by_a_number(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    masked = even(batch) & module.token_mask(batch["input_ids"])
    return (of_inputs(batch, logits) * masked).sum() / module.count_targets(int(masked.sum()))


def by_cross_entropy(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    masked = even(batch) & module.token_mask(batch["input_ids"])
    module.count_targets(masked)
    return F.cross_entropy(logits, batch["input_ids"].where(masked, -100).flatten())


def weighted(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """By a noise level of each row, as masked diffusion is."""
    level = torch.rand(len(batch["input_ids"]), 1)
    masked = even(batch) & module.token_mask(batch["input_ids"])
    losses = of_inputs(batch, logits) * masked / (0.1 + level)
    return losses.sum() / module.count_targets(masked)


CASES: list[Any] = [
    pytest.param(2, RING, weighted, id="ring 2, checked"),
    pytest.param(3, {**RING3, **OFF}, by_hand, id="ring 3"),
    pytest.param(2, {**ULYSSES, **OFF}, by_a_number, id="ulysses 2, a number"),
    pytest.param(3, RING3, by_cross_entropy, id="ring 3, cross-entropy, checked"),
    pytest.param(4, {**HYBRID, **OFF}, by_hand, id="hybrid"),
]


@lru_cache(maxsize=8)
def alone(way: Way) -> Any:
    return run_ranks(1, trained, None, way, {})[0]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "settings", "way"), CASES)
def test_padding_that_is_left_out_neither_counts_nor_trains(
    ranks: int, settings: Settings, way: Way
) -> None:
    torch.manual_seed(3)
    for got in run_ranks(ranks, trained, settings, way, {}):
        close(got, alone(way))


def drawn(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    ids = batch["input_ids"]
    masked = (torch.rand(ids.shape) < 0.4) & module.token_mask(ids)
    return (of_inputs(batch, logits) * masked).sum() / module.count_targets(masked)


@pytest.mark.nightly
def test_masks_that_are_drawn_are_those_of_any_number_of_ranks() -> None:
    (want, *_) = run_ranks(2, trained, {**RING, **OFF}, drawn, {})
    for got in run_ranks(3, trained, {**RING3, **OFF}, drawn, {}):
        close(got, want)


# -- padding that is not left out -----------------------------------------------------------------


def counted(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Labels leave padding out of the sum, and nothing leaves it out of the count."""
    labels = batch["labels"]
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)
    return (losses * even(batch)).sum() / module.count_targets(even(batch))


def counted_in_one_dimension(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    labels, masked = batch["labels"].flatten(), even(batch).flatten()
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * masked).sum() / module.count_targets(masked.double())


def trained_on(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """The count leaves padding out, and the sum does not."""
    masked = even(batch)
    count = module.count_targets(masked & module.token_mask(batch["input_ids"]))
    return (of_inputs(batch, logits) * masked).sum() / count


def of_all_tokens(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    module.count_targets(even(batch))
    return F.cross_entropy(logits, batch["input_ids"].where(even(batch), -100).flatten())


def numbered(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    labels = batch["labels"]
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)
    return (losses * even(batch)).sum() / module.count_targets(even(batch).sum())


def with_a_penalty(module: Masked, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    module.count_targets(batch["labels"] != -100)
    loss = F.cross_entropy(logits, batch["labels"].flatten())
    return loss + 1e-3 * logits.logsumexp(-1).square().mean()


@pytest.mark.quick("counted")
@pytest.mark.parametrize(
    ("way", "said", "settings", "options"),
    [
        pytest.param(counted, "counts padding", RING, {}, id="counted"),
        pytest.param(counted, "counts padding", ULYSSES, {}, id="counted, ulysses"),
        pytest.param(counted_in_one_dimension, "counts padding", RING3, {}, id="flat, ring 3"),
        pytest.param(trained_on, "trains on padding", HYBRID, {}, id="trained_on, hybrid"),
        pytest.param(
            trained_on, "trains on padding", RING, {"manual": True}, id="trained_on, manual"
        ),
        pytest.param(of_all_tokens, "padding", RING, {}, id="cross-entropy"),
        pytest.param(numbered, "given a number", RING, {}, id="numbered"),
        pytest.param(with_a_penalty, "trains on padding", RING3, {}, id="with_a_penalty, ring 3"),
        pytest.param(
            trained_on, "trains on", {**RING, "check_finite": False}, {}, id="check_finite=False"
        ),
    ],
)
def test_padding_is_refused_before_a_weight_changes(
    way: Way, said: str, settings: Settings, options: dict[str, Any]
) -> None:
    ranks = settings["ring_size"] * settings["ulysses_size"]
    match = rf"step 1: .*{said}.* on rank \d.*token_mask.*No rank has stepped"
    expect_on_every_rank(
        ranks, refused, {**settings, **OFF}, way, options, error=ConfigError, match=match
    )


@pytest.mark.nightly
def test_the_parity_check_names_padding_and_no_other_cause() -> None:
    match = rf"parity check on {2 * LENGTH} tokens: .*padding on rank \d.*token_mask"
    expect_on_every_rank(2, refused, RING, counted, {}, error=ConfigError, match=match)


def validates(rank: int, world_size: int, settings: Settings, way: Way) -> None:
    trainer_of(world_size, settings).validate(Masked(way), loader(2), verbose=False)


def test_a_mask_of_validation_is_looked_at_as_well() -> None:
    match = r"counts padding.*token_mask"
    expect_on_every_rank(3, validates, RING3, counted, error=LightningCPError, match=match)


# -- Fabric ---------------------------------------------------------------------------------------


def looped(rank: int, world_size: int, settings: Settings | None, leaves_out: bool) -> Any:
    loop = Loop(world_size, settings)
    strategy: Any = loop.fabric.strategy
    before, losses = loop.weights(), list[torch.Tensor]()
    try:
        for whole in loop.batches(4, use_distributed_sampler=False):
            batch = loop.shard(whole)
            masked = even(batch)
            if loop.parallel and leaves_out:
                masked = masked & strategy.token_mask(masked)
            count = strategy.count_targets(masked) if loop.parallel else masked.sum()
            sums = of_inputs(batch, loop.logits(batch).flatten(0, 1)) * masked
            loss = sums.sum() / count
            loop.fabric.backward(loss)
            losses.append(loop.shown(loss))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    except ConfigError:
        assert torch.equal(loop.weights(), before)
        raise
    finally:
        loop.end()
    return losses, loop.weights()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings", [RING, RING3, ULYSSES, HYBRID], ids=["ring", "ring 3", "ulysses", "hybrid"]
)
def test_in_a_loop(settings: Settings) -> None:
    ranks = settings["ring_size"] * settings["ulysses_size"]
    (want,) = run_ranks(1, looped, None, True)
    for got in run_ranks(ranks, looped, settings, True):
        close(got, want)
    match = r"step 1: .*padding on rank \d.*token_mask.*No rank has stepped"
    expect_on_every_rank(ranks, looped, settings, False, error=ConfigError, match=match)


def on_one_device(rank: int, world_size: int) -> None:
    loop = Loop(1, {"context_parallel_size": 1})
    strategy: Any = loop.fabric.strategy
    (whole,) = loader(2)
    ids = strategy.shard_batch(whole)["input_ids"]
    mask = strategy.token_mask(ids)
    assert mask.dtype == torch.bool
    assert mask.shape == (1, LENGTH)
    assert mask.all()


def test_one_device_has_no_padding() -> None:
    run_ranks(1, on_one_device)


# -- a loss that ignores another class -----------------------------------------------------------------


class IgnoresZero(Small):
    """Its labels have no -100; the strategy pads them with it."""

    def loss(self, batch: Batch) -> torch.Tensor:
        logits = self.logits(batch).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=0)


def ignoring(rank: int, world_size: int, settings: Settings | None) -> dict[str, torch.Tensor]:
    rows: Any = loader(4).dataset
    labelled: Any = [{**row, "labels": row["labels"].clamp(min=1)} for row in rows]
    module = IgnoresZero()
    if settings is None:
        alone_in_process()
    batches: Any = DataLoader(labelled, batch_size=2)
    trainer_of(world_size, settings).fit(module, batches)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "settings"), [(2, RING), (2, {**ULYSSES, **OFF}), (3, {**RING3, **OFF})], ids=str
)
def test_padding_is_ignored_by_a_loss_that_ignores_another_class(
    ranks: int, settings: Settings
) -> None:
    assert LENGTH % ranks
    (want,) = run_ranks(1, ignoring, None)
    for got in run_ranks(ranks, ignoring, settings):
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-12)
