"""Data ranks with different numbers of batches, and labels that a step changes in place."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp.errors import BatchMismatchError, ConfigError, LightningCPError, NonFiniteError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.runs import (
    HFModule,
    PlainModule,
    Run,
    make_data,
    make_module,
    make_trainer,
)

TWO_BY_TWO = (("ring_size", 2), ("ulysses_size", 1), ("data_parallel_size", 2))


def predict_three(rank: int, world_size: int) -> int:
    run = Run(strategy=TWO_BY_TWO, sampler=True)
    samples = make_data(run)[:3]
    outputs: Any = make_trainer(run, world_size, []).predict(
        make_module(run),
        DataLoader(samples, batch_size=1),  # type: ignore[arg-type]
    )
    return len(outputs)


@pytest.mark.nightly
def test_prediction_of_three_samples_on_two_data_ranks_does_not_hang() -> None:
    assert run_ranks(4, predict_three) == [2, 2, 1, 1]


class ShiftsItself(HFModule):
    """Computes its loss outside of the model, shifting what it holds."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.logits(batch)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class TakesShifted(HFModule):
    """Computes its loss outside of the model, from targets that were shifted on the whole sequence."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self.log("loss", loss)
        return loss


class ChangesLabels(HFModule):
    """Masks labels inside the step, on every rank alike, without making a new tensor."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        batch["labels"][:, ::3] = -100
        return super().training_step(batch, batch_idx)


def fit_one(rank: int, world_size: int, kind: type[HFModule], labels: str = "auto") -> None:
    strategy = (("ring_size", 2), ("ulysses_size", 1), ("labels", labels))
    run = Run(strategy=strategy, model="hf")
    module: pl.LightningModule = kind(run)
    data: Any = make_data(run)[:1]
    make_trainer(run, world_size, []).fit(module, DataLoader(data), DataLoader(data))


@pytest.mark.nightly
def test_labels_changed_in_place_are_noticed() -> None:
    expect_on_every_rank(
        2, fit_one, ChangesLabels, error=ConfigError, match="were changed after it was sharded"
    )


@pytest.mark.nightly
def test_a_loss_outside_of_the_model_must_be_declared() -> None:
    match = "called without labels.*declare labels='shift'"
    expect_on_every_rank(2, fit_one, ShiftsItself, error=ConfigError, match=match)
    expect_on_every_rank(2, fit_one, TakesShifted, error=ConfigError, match=match)
    run_ranks(2, fit_one, TakesShifted, "shift")


# -- a rank without targets, and another rank that overflows ------------------------------------------


class Overflows(PlainModule):
    """Ranks with targets have a finite loss with a gradient that is not, as under a large loss scale."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.logits(batch)
        if (batch["labels"] != -100).any():
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class HasNaN(PlainModule):
    """A masked mean: over no targets it is 0/0, with a gradient that is NaN even when muted."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        labels = batch["labels"].flatten()
        counted = (labels != -100).double()
        logits = self.logits(batch).flatten(0, 1)
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        return (losses * counted).sum() / counted.sum()


def fit_uneven(rank: int, world_size: int, kind: type[PlainModule]) -> bool:
    """One step of a batch whose targets are all in the first eighth."""
    run = Run(strategy=(("ring_size", 2), ("ulysses_size", 1), ("layout", "contiguous")))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    module, (sample, *_) = kind(run), make_data(run)
    sample["labels"][8:] = -100
    data: Any = [sample]
    make_trainer(run, world_size, []).fit(module, DataLoader(data), DataLoader(data))
    return any(bool(weight.isnan().any()) for weight in module.parameters())


@pytest.mark.nightly
def test_a_rank_without_targets_is_not_blamed_for_the_overflow_of_another() -> None:
    match = "step 1: NaN or inf in gradients on ranks 0 and 1, first that of model.embed.weight"
    expect_on_every_rank(2, fit_uneven, Overflows, error=NonFiniteError, match=match)


@pytest.mark.nightly
def test_a_rank_without_targets_is_blamed_for_its_own_nan() -> None:
    match = "the loss is nan on a rank whose part of the sequence has no valid label"
    expect_on_every_rank(2, fit_uneven, HasNaN, error=LightningCPError, match=match)


# -- a loss without its weight -------------------------------------------------------------------------


class Unweighted(PlainModule):
    """Optimizes by hand, and calls backward itself."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        loss.backward()
        return loss.detach()


def test_a_backward_of_ones_own_is_refused() -> None:
    match = "was not weighted by this rank's share.*self.manual_backward.*In place of torch.autograd.grad"
    expect_on_every_rank(2, fit_uneven, Unweighted, error=ConfigError, match=match)


class LeavesOut(Unweighted):
    """Some ranks leave the step before its backward, as a rank's own loss says."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.global_rank:
            return loss.detach()
        self.manual_backward(loss)
        return loss.detach()


def test_ranks_that_leave_out_a_backward_are_refused_and_say_how_to_decide() -> None:
    match = r"rank 0: backward; rank 1: .*left out.*backward.*decide by self.average\(loss\)"
    expect_on_every_rank(2, fit_uneven, LeavesOut, error=BatchMismatchError, match=match)
