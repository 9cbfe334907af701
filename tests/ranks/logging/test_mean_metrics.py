"""Values that are logged beside a loss and are no one process's: a metric that averages ranks' losses, and a
cross-entropy beside a loss of other targets. Each is warned of once; the ways out are exact, without a word.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchmetrics import MeanMetric

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.logs import Logs, same_reports, watched
from tests.helpers.strategies.small import LET_EMPTY, RING, Batch

pytestmark = LET_EMPTY


class Averages(Logs):
    """The usual metrics of a project, fed with ``what``."""

    what = "loss"

    def __init__(self) -> None:
        super().__init__()
        self.of_training, self.of_validation = MeanMetric(), MeanMetric()

    def feed(self, metric: MeanMetric, batch: Batch) -> torch.Tensor:
        labels = batch["labels"]
        losses = F.cross_entropy(self.logits(batch).transpose(1, 2), labels, reduction="none")
        counted = labels != -100
        loss = losses.sum() / counted.sum().clamp(min=1)
        if self.what == "tokens":
            metric(losses[counted].detach())
        elif self.what == "weights":
            metric(loss.detach(), weight=counted.sum())
        else:
            metric(loss.detach() if self.what == "loss" else self.average(loss.detach()))
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.feed(self.of_training, batch)
        self.log("train/loss", self.of_training, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.feed(self.of_validation, batch)
        self.log("val/loss", self.of_validation, on_step=False, on_epoch=True)


class OfAverages(Averages):
    what = "average"


class OfTokens(Averages):
    what = "tokens"


class Weighted(Averages):
    what = "weights"


@pytest.mark.nightly
def test_a_metric_that_averages_losses_of_ranks_is_said_once() -> None:
    reports = run_ranks(2, watched, RING, Averages, (6, 6), False)
    told = [x for report in reports for x in report["told"]]
    assert sorted(re.findall(r"self.log\('(\w+/\w+)'", " ".join(told))) == [
        "train/loss",
        "val/loss",
    ]
    assert all("MeanMetric" in x and "self.average(loss)" in x for x in told)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [OfAverages, OfTokens, Weighted])
def test_metrics_of_averages_and_tokens_are_exact_without_a_word(kind: Any) -> None:
    (want,) = run_ranks(1, watched, None, kind, (6, 6), False)
    for got in run_ranks(2, watched, RING, kind, (6, 6), False):
        assert got["told"] == []
        same_reports(got, want)


class Beside(Logs):
    """Trains on a part of its targets, and logs a loss of all."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        logits, labels = self.logits(batch), batch["labels"]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        mask = (labels != -100) & (batch["input_ids"] % 3 == 0) & self.token_mask(labels)
        loss = (losses * mask).sum() / self.count_targets(mask)
        self.log("part", loss)
        self.log("all", F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        return loss


def test_a_loss_of_other_targets_than_declared_is_said_once_in_training() -> None:
    reports = run_ranks(2, watched, RING, Beside, (4, 0), False)
    (told,) = [x for report in reports for x in report["told"]]
    assert re.search(
        r"self.log\('all', ...\) in training_step was given a mean over other targets", told
    )
