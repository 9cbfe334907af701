"""``cp_log``: a mean of which every rank holds a sum and a count is one process's, at every level."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.kinds import LabelsAreInputs
from tests.helpers.strategies.logs import RING_TWICE, Logs, Report, same_reports, watched
from tests.helpers.strategies.small import HYBRID, RING, Batch, Settings, samples, trainer_of
from tests.ranks.strategies.test_fabric import fabric_of

BOTH: Any = {"on_step": True, "on_epoch": True}


class Counted(Logs):
    """Logs sums with counts; keeps what it had, so that the means can be computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[float, float]]] = {"train": [], "val": []}
        self.empty = 0

    def sums(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits(batch).flatten(0, 1)
        total = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
        return total, (batch["labels"] != -100).sum()

    def counted(self, stage: str, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss, count = self.sums(batch)
        total = loss.detach()
        self.found[stage].append((float(total), float(count)))
        mean = total / count
        self.empty += int(count == 0)
        for level in ("step", "epoch", "both"):
            levels = {"on_step": level != "epoch", "on_epoch": level != "step"}
            self.cp_log(f"{stage}_{level}", total, count, prog_bar=True, **levels)
        self.cp_log(f"{stage}_default", total, float(count), sync_dist=batch_idx > 0)
        self.cp_log(f"{stage}_product", mean * count, int(count))  # NaN where nothing is counted
        if count:
            self.cp_log(f"{stage}_some", total, count, **BOTH)
        if self.trainer.is_global_zero:
            self.cp_log(f"{stage}_alone", 0.5 * batch_idx, 2, logger=False, **BOTH)
        used = batch_idx % 2 == 0
        self.cp_log(f"{stage}_second", total * used, count * used, **BOTH)
        return loss / count.clamp(min=1)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.counted("train", batch, batch_idx)
        self.kept = loss.detach()
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.counted("val", batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.cp_log("test", *self.sums(batch))

    def on_after_backward(self) -> None:
        self.cp_log("after_backward", *self.last("train"), **BOTH)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.cp_log("batch_end", *self.last("train"), **BOTH)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.cp_log("val_batch_end", *self.last("val"), **BOTH)

    def on_train_epoch_end(self) -> None:
        self.cp_log("train_end", *self.all("train"))

    def on_validation_epoch_end(self) -> None:
        self.cp_log("val_end", *self.all("val"))

    def last(self, stage: str) -> tuple[float, float]:
        return self.found[stage][-1]

    def all(self, stage: str) -> tuple[float, float]:
        totals, counts = zip(*self.found[stage], strict=True)
        return sum(totals), sum(counts)


@lru_cache(maxsize=1)
def plain() -> Report:
    (want,) = run_ranks(1, watched, None, Counted)
    return want


@pytest.mark.nightly
@pytest.mark.parametrize(("settings", "ranks"), [(RING, 2), (HYBRID, 4)])
def test_it_shows_what_one_process_shows(settings: Settings, ranks: int) -> None:
    reports = run_ranks(ranks, watched, settings, Counted)
    for report in reports:
        same_reports(report, plain())
        assert not report["told"]
    counts = [count for report in reports for _, count in report["module"]["train"]]
    assert 0 in counts, "some rank counted nothing"


def test_one_process_shows_means_over_tokens() -> None:
    """The oracle of the other tests, by hand: a batch in which nothing is counted changes no mean."""
    want = plain()
    steps = want["module"]["train"]
    shown = [row["train_both_step"] for row in want["csv"] if "train_both_step" in row]
    assert shown == pytest.approx([total / count for total, count in steps], rel=1e-12)
    (end,) = (row for row in want["csv"] if "train_both_epoch" in row)
    totals, counts = (sum(column) for column in zip(*steps, strict=True))
    assert end["train_both_epoch"] == pytest.approx(totals / counts, rel=1e-12)
    assert end["train_end"] == pytest.approx(totals / counts, rel=1e-12)
    totals, counts = (sum(column) for column in zip(*steps[::2], strict=True))
    assert end["train_second_epoch"] == pytest.approx(totals / counts, rel=1e-12)
    seconds = [row["train_second_step"] for row in want["csv"] if "train_both_step" in row]
    assert [x != x for x in seconds] == [False, True] * 2 + [False], "NaN where nothing is counted"


class BySelfLog(Counted):
    """What ``cp_log`` is without context parallelism."""

    def cp_log(self, name: str, total: Any, count: Any, **log_options: Any) -> None:
        if count:
            self.log(name, total / count, batch_size=count, **log_options)


def test_in_one_process_it_is_self_log() -> None:
    (want,) = run_ranks(1, watched, None, BySelfLog)
    same_reports(plain(), want, skip="second")


class Uneven(Counted):
    """Data ranks have different numbers of validation batches, of different sizes."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        rank = getattr(self.trainer.strategy, "data_rank", self.global_rank)
        self.log("rows", rank + 1.5, batch_size=3 + 2 * rank, sync_dist=True, on_epoch=True)


def uneven(rank: int, world_size: int, settings: Settings | None) -> dict[str, Any]:
    """Two training batches for each data rank, and two or three for validation."""
    module = Uneven()
    trainer = trainer_of(world_size, settings, max_epochs=1)
    which: int = trainer.strategy.data_rank  # type: ignore[attr-defined]
    data: list[Any] = samples(12)
    train = DataLoader(data[6 * which : 6 * which + 4], batch_size=2)  # type: ignore[arg-type]
    val = DataLoader(data[4 * which : 4 * which + 4 + which], batch_size=2)  # type: ignore[arg-type]
    seen: dict[str, list[float]] = {"train": [], "val": []}

    def look(stage: str) -> None:
        assert trainer._results is not None
        key = {"train": "training_step.train_both", "val": "validation_step.val_both"}[stage]
        seen[stage].append(float(trainer._results[key]._forward_cache))

    module.on_before_zero_grad = lambda optimizer: look("train")  # type: ignore[method-assign]
    module.on_validation_batch_end = lambda *args: look("val")  # type: ignore[method-assign]
    trainer.fit(module, train, val)
    metrics = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return {"had": module.found, "seen": seen, "metrics": metrics}


def means(pairs: list[list[tuple[float, float]]]) -> list[float]:
    """Of each step, over the ranks given."""
    return [sum(t for t, _ in step) / sum(n for _, n in step) for step in zip(*pairs, strict=True)]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True:UserWarning")
def test_with_data_parallelism_every_token_of_all_ranks_counts_the_same() -> None:
    """In training steps go together; in validation a rank shows its own group's, and nobody waits."""
    got = run_ranks(4, uneven, RING_TWICE)
    want = means([report["had"]["train"] for report in got])
    for rank, report in enumerate(got):
        assert report["seen"]["train"] == pytest.approx(want, rel=1e-12)
        pair = got[rank // 2 * 2 : rank // 2 * 2 + 2]
        shown = means([peer["had"]["val"] for peer in pair])
        assert report["seen"]["val"] == pytest.approx(shown, rel=1e-12)
        assert len(shown) == 2 + rank // 2
        for stage in ("train", "val"):
            pairs = [step for peer in got for step in peer["had"][stage]]
            mean = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
            for name in (
                f"{stage}_epoch",
                f"{stage}_both",
                f"{stage}_product",
                f"{stage}_some",
                f"{stage}_end",
            ):
                if name == "train_product":  # logged on step only
                    continue
                assert report["metrics"][name] == pytest.approx(mean, rel=1e-12), name


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True:UserWarning")
def test_epoch_means_of_uneven_data_ranks_are_not_cut_off() -> None:
    """Two batches of 3 rows and three of 5: Lightning would divide by 10 instead of 10.5."""
    got = run_ranks(4, uneven, RING_TWICE)
    want = (2 * 3 * 1.5 + 3 * 5 * 2.5) / (2 * 3 + 3 * 5)
    assert [report["metrics"]["rows"] for report in got] == pytest.approx([want] * 4, rel=1e-12)


class OfUnknownHeads(LabelsAreInputs):
    """The mesh has to wait for the model."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.cp_log("tokens", batch["input_ids"].sum(), batch["input_ids"].numel())
        return loss


def of_unknown_heads(rank: int, world_size: int, settings: Settings | None) -> float:
    module = OfUnknownHeads()
    trainer = trainer_of(world_size, settings and {**settings, "labels": "auto"})
    trainer.fit(module, module.loader())
    return float(trainer.callback_metrics["tokens"])


@pytest.mark.nightly
def test_the_mesh_may_come_after_the_callbacks_setup() -> None:
    (want,) = run_ranks(1, of_unknown_heads, None)
    got = run_ranks(2, of_unknown_heads, {"padding": True})
    assert got[0] == got[1] > 0
    assert got[0] * 30 == pytest.approx(want * 29), "29 tokens, and one of padding"


def in_fabric(rank: int, world_size: int) -> tuple[float, float]:
    fabric = fabric_of(world_size, RING)
    fabric.launch()
    strategy: Any = fabric.strategy
    total, count = torch.tensor([[float("nan"), 0.0], [6.0, 4.0]][rank])
    return float(strategy.token_mean(total, count)), float(
        strategy.all_reduce(torch.tensor(3 + rank))
    )


def test_fabric_has_a_mean_over_tokens() -> None:
    """The ring's first rank has counted nothing; means of integers are not cut off."""
    assert run_ranks(2, in_fabric) == [(1.5, 3.5)] * 2


class Refused(Logs):
    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.cp_log("a", self.wrong, 1, **self.options)
        return loss

    wrong: Any = 1.0
    options: dict[str, Any] = {}  # noqa: RUF012


class AnOption(Refused):
    options: dict[str, Any] = {"reduce_fx": "sum"}  # noqa: RUF012


class AVector(Refused):
    wrong: Any = torch.zeros(3)


@pytest.mark.nightly
def test_what_it_does_not_take() -> None:
    match = "cp_log does not take reduce_fx"
    expect_on_every_rank(2, watched, RING, AnOption, error=ConfigError, match=match)
    match = r"takes two scalars, got a value of shape \(3,\)"
    expect_on_every_rank(2, watched, RING, AVector, error=ConfigError, match=match)
