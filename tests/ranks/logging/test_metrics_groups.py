"""torchmetrics: shard-local values over all ranks, whole ones once for each group of ranks."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import Accuracy, MeanMetric, MetricCollection, SumMetric
from torchmetrics.text import Perplexity

from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.logs import DDP, RING_TWICE, Logs, same_reports, watched
from tests.helpers.strategies.small import HYBRID, RING, VOCAB, Batch, loader, trainer_of


def accuracy() -> Accuracy:
    return Accuracy(task="multiclass", num_classes=VOCAB, average="micro", ignore_index=-100)  # type: ignore[abstract]


class Measured(Logs):
    """Feeds metrics with a rank's own tokens, and others with whole sequences."""

    context_parallel_replicated_metrics: ClassVar = ("rows", "whole", "inner.losses")

    def __init__(self) -> None:
        super().__init__()
        self.perplexity = Perplexity(ignore_index=-100)
        self.tokens = SumMetric()
        self.local = MetricCollection({"accuracy": accuracy(), "again": accuracy()})
        self.rows = SumMetric()
        self.whole = MetricCollection(
            {"hits": accuracy(), "sum": SumMetric()}, compute_groups=False
        )
        self.inner = nn.ModuleDict({"losses": SumMetric()})
        self.by_hand = SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        logits, targets = self.logits(batch), batch["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        losses: Any = self.inner["losses"]
        losses(self.average(loss.detach()))
        self.log("losses", losses, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits, targets = self.logits(batch), batch["labels"]
        flat = logits.flatten(0, 1), targets.flatten()
        self.perplexity.update(logits, targets)
        self.log("perplexity", self.perplexity)
        self.tokens.update((targets != -100).sum())
        self.by_hand.update((targets != -100).sum())
        self.log("tokens", self.tokens)
        self.local.update(*flat)
        self.log_dict(self.local)
        whole, wanted = self.unshard(logits), self.unshard(targets)
        self.rows(len(whole))
        self.log("rows", self.rows, on_step=True, on_epoch=True)
        self.whole["hits"].update(whole.flatten(0, 1), wanted.flatten())
        self.whole["sum"].update(whole.square().sum())
        self.log_dict(self.whole)

    def on_validation_epoch_end(self) -> None:
        self.log("by_hand", self.by_hand.compute())
        self.log("rows_by_hand", self.rows.compute())
        self.by_hand.reset()


@pytest.mark.nightly
def test_metrics_show_what_one_process_shows() -> None:
    (want,) = run_ranks(1, watched, None, Measured, test=False)
    end = want["seen"][-1]
    assert end["callback_metrics: rows"] == 5
    assert len(end) > 20
    for settings, ranks in ((RING, 2), (HYBRID, 4)):
        for report in run_ranks(ranks, watched, settings, Measured, test=False):
            same_reports(report, want)
            assert not report["told"]


@pytest.mark.nightly
def test_with_data_parallelism_they_show_what_plain_ddp_shows() -> None:
    want = run_ranks(2, watched, DDP, Measured, test=False)
    for rank, report in enumerate(run_ranks(4, watched, RING_TWICE, Measured, test=False)):
        same_reports(report, want[rank // 2])


class OnStep(Logs):
    """Metrics of a rank's own tokens that are shown at the step."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mean = SumMetric(), MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.tokens((batch["labels"] != -100).sum())
        self.log("tokens", self.tokens, on_step=True, on_epoch=True)
        self.mean(batch_idx)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss


@pytest.mark.nightly
def test_a_metric_that_differs_at_the_step_is_told_and_right_for_the_epoch() -> None:
    (want,) = run_ranks(1, watched, None, OnStep, test=False)
    first, second = run_ranks(2, watched, RING, OnStep, test=False)
    for report in (first, second):
        same_reports(report, want, skip="tokens")
    epoch = "callback_metrics: tokens_epoch"
    assert first["seen"][-1][epoch] == second["seen"][-1][epoch] == want["seen"][-1][epoch]
    assert first["seen"] == second["seen"], "monitors see the same"
    (told,) = first["told"]
    assert "self.log('tokens', ...)" in told
    assert "the metric's value for the epoch is not affected" in told


class Unknown(Measured):
    context_parallel_replicated_metrics: ClassVar = ("row",)


class NotWhole(Measured):
    context_parallel_replicated_metrics: ClassVar = ("tokens",)


@pytest.mark.nightly
def test_wrong_declarations() -> None:
    match = "names 'row', but the module's metrics are perplexity, tokens, local"
    expect_on_every_rank(2, watched, RING, Unknown, error=ConfigError, match=match)
    match = "metric 'tokens' is declared .* updated it with different values"
    expect_on_every_rank(2, watched, RING, NotWhole, error=ConfigError, match=match)


class Copies(Measured):
    """As callbacks that average weights do."""

    def on_fit_start(self) -> None:
        trainer, self._trainer = self._trainer, None
        self.copies = [copy.deepcopy(self)]
        self._trainer = trainer
        self.copies[0].rows.update(1)
        self.copies.clear()


def released(rank: int, world_size: int) -> list[Any]:
    module = Copies()
    trainer_of(world_size, RING).fit(module, loader(4), loader(4))
    metrics = [module.rows, module.whole["sum"], module.inner["losses"]]
    return [metric.dist_sync_fn for metric in metrics]  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True:UserWarning")
def test_metrics_are_given_back_and_modules_can_be_copied() -> None:
    assert run_ranks(2, released) == [[None] * 3] * 2
