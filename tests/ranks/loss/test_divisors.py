"""Losses of batches in which all ranks count as many targets: a wrong divisor is the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ConfigError, ParityError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    LET_EMPTY,
    RING,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    Small,
    close,
    samples,
    trainer_of,
    weights,
)
from tests.ranks.loss.test_sequence_losses import logps, of_whole
from tests.ranks.loss.test_whole_values import count
from tests.ranks.strategies.test_fabric import Loop

pytestmark = LET_EMPTY

GRIDS = pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (2, ULYSSES), (4, HYBRID)],
    ids=["ring 2", "ulysses 2", "hybrid"],
)

Way = Callable[[Loop, Batch, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a loop, a batch, values [B, L] and a mask [B, L] that is true."""


def total(loop: Loop, x: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
    return of_whole(loop, "sequence_sum", x, *mask)


def regulariser(loop: Loop) -> torch.Tensor:
    return sum((p.square().sum() for p in loop.model.parameters()), torch.zeros(()))


COUNTED_WRONG: dict[str, Way] = {
    "mean over rows of sums": lambda loop, batch, x, mask: x.sum(1).mean() + 0 * count(loop, mask),
    "sum": lambda loop, batch, x, mask: (x * mask).sum() * (count(loop, mask) > 0),
    "function of a vector": lambda loop, batch, x, mask: (
        (loop.logits(batch).sum((0, 1)) / count(loop, mask)).square().sum()
    ),
    "product of vectors": lambda loop, batch, x, mask: (
        loop.logits(batch).detach().square().mean((0, 1))
        @ loop.logits(batch).softmax(-1).mean((0, 1))
        + 0 * count(loop, mask)
    ),
    "a whole sum by it": lambda loop, batch, x, mask: total(loop, x).sum() / count(loop, mask),
    "a whole sum by some": lambda loop, batch, x, mask: (
        total(loop, x).sum() / count(loop, mask & (torch.arange(x.shape[1]) % 3 == 0))
    ),
    "a whole sum by the mask": lambda loop, batch, x, mask: (
        x.sum() / count(loop, mask) + total(loop, x, mask).sum() / mask.sum()
    ),
    "rows by the mask": lambda loop, batch, x, mask: (
        x.sum() / count(loop, mask) + (total(loop, x, mask) / mask.sum(1)).mean()
    ),
    "a regulariser by it": lambda loop, batch, x, mask: (
        (x.sum() + regulariser(loop)) / count(loop, mask)
    ),
}

WHOLE_WRONG: dict[str, Way] = {
    "by numel": lambda loop, batch, x, mask: total(loop, x).sum() / x.numel(),
    "by length": lambda loop, batch, x, mask: total(loop, x).mean() / x.shape[1],
    "by a mask": lambda loop, batch, x, mask: total(loop, x, mask).sum() / mask.sum(),
}

COUNTED_RIGHT: dict[str, Way] = {
    "sum by it": lambda loop, batch, x, mask: x.sum() / count(loop, mask),
    "sum by the mask": lambda loop, batch, x, mask: x.sum() / mask.sum() + 0 * count(loop, mask),
    "mean": lambda loop, batch, x, mask: x.mean() + 0 * count(loop, mask),
    "means of rows": lambda loop, batch, x, mask: x.mean(1).mean() + 0 * count(loop, mask),
    "each by it": lambda loop, batch, x, mask: (x.square() * mask / count(loop, mask)).sum() / 2,
    "by a number": lambda loop, batch, x, mask: (
        0.3 * (x.square() * 0.5).sum() / float(count(loop, mask))
    ),
    "a vector": lambda loop, batch, x, mask: (
        loop.logits(batch).square().sum((0, 1)) / count(loop, mask)
    ).mean(),
    "a vector by weights": lambda loop, batch, x, mask: (
        (loop.logits(batch).softmax(-1).sum((0, 1)) / count(loop, mask))
        @ torch.arange(float(VOCAB)).double()
    ),
    "numbers of tokens": lambda loop, batch, x, mask: (
        (loop.logits(batch).square() * mask[..., None]).sum() / (count(loop, mask) * VOCAB)
    ),
    "row in chosen tokens": lambda loop, batch, x, mask: (
        of_whole(loop, "sequence_mean", x).exp()[:, None].expand_as(x)[mask].sum()
        / count(loop, mask)
    ),
    "numbers of chosen tokens": lambda loop, batch, x, mask: (
        loop.logits(batch)[mask].square().sum() / (mask.sum() * VOCAB) + 0 * count(loop, mask)
    ),
    "sums of tokens": lambda loop, batch, x, mask: (
        (loop.logits(batch).square().sum(-1) * mask).sum() / (count(loop, mask) * VOCAB)
    ),
    "beside a regulariser": lambda loop, batch, x, mask: (
        x.sum() / count(loop, mask) + 0.01 * regulariser(loop)
    ),
    "times a learned number": lambda loop, batch, x, mask: (
        x.sum() * regulariser(loop).mul(1e-4).exp() / count(loop, mask)
    ),
    "chunks": lambda loop, batch, x, mask: (
        torch.stack([y.sum() for y in x.split(3, 1)]).sum() / count(loop, mask)
    ),
    "beside whole rows": lambda loop, batch, x, mask: (
        x.sum() / count(loop, mask) + of_whole(loop, "sequence_mean", x).square().mean()
    ),
    "times whole rows": lambda loop, batch, x, mask: (
        (of_whole(loop, "sequence_mean", x).exp()[:, None] * x).sum() / count(loop, mask)
    ),
}

WHOLE_RIGHT: dict[str, Way] = {
    "by its sum": lambda loop, batch, x, mask: (
        total(loop, x).sum() / total(loop, mask.double()).sum()
    ),
    "mean": lambda loop, batch, x, mask: of_whole(loop, "sequence_mean", x).mean() / 3,
    # As many tokens of a row as a rank has of all rows.
    "sums by sums": lambda loop, batch, x, mask: (total(loop, x) / total(loop, mask)).mean(),
}


FEATURES_RIGHT: dict[str, Way] = {
    "mean square": lambda loop, batch, x, mask: (
        F.mse_loss(loop.logits(batch)[mask], loop.logits(batch).detach()[mask] + 1)
        + 0 * count(loop, mask)
    ),
    "mean square of all": lambda loop, batch, x, mask: (
        F.mse_loss(torch.zeros(2, x.shape[1], VOCAB), loop.logits(batch)) + 0 * count(loop, mask)
    ),
    "mean of features": lambda loop, batch, x, mask: (
        loop.logits(batch).square().mean() + 0 * count(loop, mask)
    ),
}

ASKED: dict[str, Way] = {
    "half": lambda loop, batch, x, mask: x.sum() / (2 * count(loop, mask)),
}
"""Exact, but not seen to be."""


def steps(
    rank: int,
    world_size: int,
    settings: Settings | None,
    way: str,
    labels: str = "none",
    *,
    checked: bool = False,
) -> torch.Tensor:
    """Two steps on rows whose length divides; a refused one changes no weight."""
    loop = Loop(world_size, None if settings is None else {"labels": labels, **settings})
    strategy: Any = loop.fabric.strategy
    before = weights(loop.model)
    try:
        for whole in loop.batches(4, use_distributed_sampler=False):
            names = ("input_ids", "labels") if labels == "aligned" else ("input_ids",)
            cut = {name: whole[name][:, :24] for name in names}
            if checked and loop.parallel:
                strategy.check_parity(cut, partial(loss_of, loop, way))
            loop.fabric.backward(loss_of(loop, way, loop.shard(cut)))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            before = None
    finally:
        loop.end()
        assert before is None or torch.equal(weights(loop.model), before)
    return weights(loop.model)


WAYS = COUNTED_WRONG | WHOLE_WRONG | COUNTED_RIGHT | WHOLE_RIGHT | FEATURES_RIGHT | ASKED


def loss_of(loop: Loop, way: str, batch: Batch) -> torch.Tensor:
    x = logps(loop, batch)
    return WAYS[way](loop, batch, x, torch.ones_like(x, dtype=torch.bool))


@lru_cache(maxsize=8)
def alone(way: str) -> torch.Tensor:
    return run_ranks(1, steps, None, way)[0]


@GRIDS
@pytest.mark.parametrize("labels", ["none", "aligned"])
@pytest.mark.parametrize("way", COUNTED_WRONG)
@pytest.mark.quick("*-none-ring 2", "sum-aligned-ring 2", "function of a vector-none-hybrid")
def test_a_sum_that_its_count_does_not_divide_is_asked_about(
    ranks: int, settings: Settings, labels: str, way: str
) -> None:
    match = (
        "(not seen to be divided|is divided by|do not weigh the same).*fabric.strategy.check_parity"
    )
    expect_on_every_rank(ranks, steps, settings, way, labels, error=ConfigError, match=match)


@GRIDS
@pytest.mark.parametrize("way", WHOLE_WRONG)
@pytest.mark.quick("*-ring 2", "by numel-hybrid")
def test_a_value_of_whole_rows_by_a_number_of_a_rank_is_asked_about(
    ranks: int, settings: Settings, way: str
) -> None:
    match = "whole sequences, or of parameters, is divided by .*fabric.strategy.check_parity"
    expect_on_every_rank(ranks, steps, settings, way, error=ConfigError, match=match)


@GRIDS
@pytest.mark.parametrize("way", COUNTED_RIGHT | WHOLE_RIGHT | FEATURES_RIGHT)
@pytest.mark.quick("*-ring 2", "a vector-hybrid")
def test_right_divisors_equal_one_process(ranks: int, settings: Settings, way: str) -> None:
    for got in run_ranks(ranks, steps, settings, way):
        close(got, alone(way))


@pytest.mark.parametrize("checked", [False, True])
def test_one_check_answers(checked: bool) -> None:
    if not checked:
        match = (
            "ranks have targets, here 24, .*not seen to be divided by.*fabric.strategy.check_parity"
        )
        expect_on_every_rank(2, steps, RING, "half", error=ConfigError, match=match)
        return
    for got in run_ranks(2, steps, RING, "half", checked=True):
        close(got, alone("half"))


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("a whole sum by it", "a loss of whole sequences, times a number of a rank's own tokens"),
        ("function of a vector", "a loss that is not a mean over targets"),
    ],
)
def test_a_check_names_the_mistake(way: str, cause: str) -> None:
    checked = partial(steps, checked=True)
    match = f"Likely cause: {cause}"
    expect_on_every_rank(2, checked, RING, way, error=ParityError, match=match)


class Dividing(ContextParallelMixin, Small):
    """Divides a sum over tokens by ``times`` its count."""

    def __init__(self, times: float, automatic: bool) -> None:
        super().__init__()
        self.times, self.automatic_optimization = times, automatic

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        ids = batch["input_ids"]
        values = self.logits(batch).log_softmax(-1).gather(-1, ids[..., None])
        loss = values.sum() / (self.times * self.count_targets(torch.ones_like(ids)))
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None


def fitted(
    rank: int,
    world_size: int,
    settings: Settings | None,
    times: float,
    automatic: bool = True,
) -> torch.Tensor:
    module = Dividing(times, automatic)
    rows = [{"input_ids": sample["input_ids"][:24]} for sample in samples(6)]
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    given = None if settings is None else {**settings, "labels": "none"}
    trainer_of(world_size, given).fit(module, loader)
    return weights(module)


def test_the_trainer_s_check_answers() -> None:
    (want,) = run_ranks(1, fitted, None, 2.0)
    for got in run_ranks(2, fitted, RING, 2.0):
        close(got, want)


def fitted_by_number(rank: int, world_size: int, settings: Settings | None) -> torch.Tensor:
    """The number of accumulated batches is that of a rank's targets."""
    module = FewTargets()
    rows = [{"input_ids": sample["input_ids"][:24]} for sample in samples(8)]
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    given = None if settings is None else {**settings, "labels": "none"}
    trainer_of(world_size, given, accumulate_grad_batches=4).fit(module, loader)
    return weights(module)


class FewTargets(ContextParallelMixin, Small):
    """A mean over two tokens of each row on each of two ranks."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        values = self.logits(batch).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
        at = batch.get("position_ids", torch.arange(24)[None]).expand(ids.shape)
        mask = at % 6 == 5
        return (values * mask).sum() / self.count_targets(mask)


def test_accumulated_batches_may_be_as_many_as_targets() -> None:
    (want,) = run_ranks(1, fitted_by_number, None)
    for got in run_ranks(2, fitted_by_number, {**RING, "parity_check": "off"}):
        close(got, want)


@pytest.mark.parametrize("automatic", [True, False])
def test_a_trainer_without_a_check_asks(automatic: bool) -> None:
    settings = {**RING, "parity_check": "off"}
    match = "ranks have targets, here 24, .*not seen to be divided by.*parity_check"
    expect_on_every_rank(*(2, fitted, settings, 2.0, automatic), error=ConfigError, match=match)


@pytest.mark.parametrize("automatic", [True, False])
def test_a_trainer_asks_nothing_about_the_count_itself(automatic: bool) -> None:
    (want,) = run_ranks(1, fitted, None, 1.0, automatic)
    for got in run_ranks(2, fitted, {**RING, "parity_check": "off"}, 1.0, automatic):
        close(got, want)


def over_rows(loop: Loop, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Wrong: the sum of a rank's tokens, divided by rows."""
    return (x * mask).sum(1).mean() + 0 * count(loop, mask)


def of_first_tokens(loop: Loop, step: int, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return over_rows(loop, x, at < 12)


def of_one_rank_first(loop: Loop, step: int, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return over_rows(loop, x, at < (24 if step else 12))


def right_first(loop: Loop, step: int, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return over_rows(loop, x, at >= 0) if step else x.sum() / count(loop, at >= 0)


def rows_right_first(loop: Loop, step: int, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return total(loop, x).sum() / (x.numel() if step else 100)


def checked_first(loop: Loop, step: int, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """A check of the exact loss says nothing about the wrong one."""
    return over_rows(loop, x, at >= 0) if step else x.sum() / (2 * float(count(loop, at >= 0)))


def train_cut_rows(
    loop: Loop, loss_at: Callable[[int, Batch], torch.Tensor], *, checks: bool
) -> None:
    """Train on rows of 24 tokens; with a check of parity in the first step, if one is asked for."""
    strategy: Any = loop.fabric.strategy
    try:
        for step, whole in enumerate(loop.batches(4, use_distributed_sampler=False)):
            cut, loss = {"input_ids": whole["input_ids"][:, :24]}, partial(loss_at, step)
            if checks and not step:
                strategy.check_parity(cut, loss)
            loop.fabric.backward(loss(loop.shard(cut)))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    finally:
        loop.end()


def later(rank: int, world_size: int, settings: Settings, way: Any) -> None:
    """Two steps; the loss is wrong in the second one at the latest."""
    loop = Loop(world_size, {**settings, "labels": "none", "layout": "contiguous"})

    def loss_at(step: int, batch: Batch) -> torch.Tensor:
        x = logps(loop, batch)
        return way(loop, step, x, batch["position_ids"].expand(x.shape))

    train_cut_rows(loop, loss_at, checks=way is checked_first)


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        (4, of_first_tokens),
        (2, of_one_rank_first),
        (2, right_first),
        (2, rows_right_first),
        (2, checked_first),
    ],
)
def test_each_loss_is_looked_at(ranks: int, way: Any) -> None:
    """Also of ranks some of which have no target, and behind a right loss or a check of another one."""
    settings = {**RING, "ring_size": ranks}
    match = "(not seen to be divided|is divided by).*fabric.strategy.check_parity"
    expect_on_every_rank(ranks, later, settings, way, error=ConfigError, match=match)


BY_DATA: Settings = {**RING, "data_parallel_size": 2, "layout": "contiguous"}


class ByShares(ContextParallelMixin, Small):
    """From its second step on an exact loss that is not seen to be one, where ranks count alike."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        ids, strategy = batch["input_ids"], self.trainer.strategy
        values = self.logits(batch).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
        mesh = getattr(strategy, "mesh", None)
        counted = 18 if mesh is not None and mesh.data_rank else 24
        mask = batch["position_ids"].expand(ids.shape) < counted
        count = self.count_targets(mask)
        if not self.trainer.global_step:
            return (values * mask).sum() / count
        return (values * (mask / count)).sum()


def fitted_by_shares(rank: int, world_size: int, settings: Settings) -> torch.Tensor:
    module = ByShares()
    rows = [{"input_ids": sample["input_ids"][:24]} for sample in samples(12)]
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    trainer_of(world_size, {**settings, "labels": "none"}).fit(module, loader)
    return weights(module)


def test_all_ranks_know_what_a_check_found() -> None:
    """Only the first of two samples is in doubt."""
    first, *others = run_ranks(4, fitted_by_shares, BY_DATA)
    for got in others:
        close(got, first)


def checked_by_halves(rank: int, world_size: int, settings: Settings | None) -> torch.Tensor:
    """Data rank 0 halves the loss of the first step, data rank 1 that of the second.

    The check runs in the first step. One process has the rows of both, which are the same.
    """
    loop = Loop(world_size, None if settings is None else {**settings, "labels": "none"})
    strategy: Any = loop.fabric.strategy

    def loss_at(step: int, batch: Batch) -> torch.Tensor:
        x = logps(loop, batch)
        if not loop.parallel:
            return x.mean() * 0.75
        times = 2 if strategy.mesh.data_rank == step else 1
        return x.sum() / (times * count(loop, torch.ones_like(x, dtype=torch.bool)))

    train_cut_rows(loop, loss_at, checks=loop.parallel)
    return weights(loop.model)


def test_a_check_answers_for_samples_of_other_ranks() -> None:
    (want,) = run_ranks(1, checked_by_halves, None)
    for got in run_ranks(4, checked_by_halves, {**RING, "data_parallel_size": 2}):
        close(got, want)


class ByLength(ContextParallelMixin, Small):
    """Divides a sum of rows by a constant that is the number of a rank's tokens in a row."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"]
        values = self.logits(batch).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
        return self.sequence_sum(values).sum() / 12


def fitted_by_length(rank: int, world_size: int, tokens: int) -> torch.Tensor:
    module = ByLength()
    rows = [{"input_ids": sample["input_ids"][:24]} for sample in samples(6)]
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    settings = {**RING, "ring_size": world_size, "labels": "none", "parity_tokens": tokens}
    trainer_of(world_size, settings).fit(module, loader)
    return weights(module)


@pytest.mark.parametrize("tokens", [16, 48])
def test_a_check_of_fewer_tokens_answers_too(tokens: int) -> None:
    (want,) = run_ranks(1, fitted_by_length, tokens)
    for got in run_ranks(2, fitted_by_length, tokens):
        close(got, want)
