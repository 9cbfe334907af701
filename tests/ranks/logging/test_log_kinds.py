"""Values that are no means over targets: exact where ranks agree, and where not the user is told once."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.logs import DDP, RING_TWICE, Logs, Report, same_reports, watched
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    RING3,
    ULYSSES,
    Batch,
    loader,
    samples,
    trainer_of,
)

BOTH: Any = {"on_step": True, "on_epoch": True}


class Kinds(Logs):
    """Logs counts, sums and flags, the same ones and a rank's own."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.step("train", batch, batch_idx)
        self.kept = loss.detach()
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.step("val", batch, batch_idx)

    def step(self, stage: str, batch: Batch, batch_idx: int) -> torch.Tensor:
        logits, targets = self.logits(batch).flatten(0, 1), batch["labels"].flatten()
        valid = targets != -100
        loss = F.cross_entropy(logits, targets)
        total = F.cross_entropy(logits, targets, reduction="sum")
        # the same on all ranks
        self.log(f"{stage}_rows", len(batch["labels"]), False, True, True, True)
        self.log(f"{stage}_index", torch.tensor(batch_idx), **BOTH)
        self.log(f"{stage}_flag", torch.tensor(batch_idx % 2 == 0), **BOTH)
        self.log(f"{stage}_rate", 0.1, **BOTH, reduce_fx="sum")
        self.log(f"{stage}_third", 1 / 3, **BOTH)
        # means over targets
        self.log(f"{stage}_graph", loss, enable_graph=True, **BOTH)
        self.log(f"{stage}_large", loss, reduce_fx="max", **BOTH)
        self.log(f"{stage}_small", loss, reduce_fx=torch.min, **BOTH)
        self.log(f"{stage}_alone", loss, rank_zero_only=True, **BOTH)
        self.log_dict({f"{stage}_a": loss, f"{stage}_b": -loss}, logger=True, prog_bar=True)
        # a rank's own
        self.log(f"{stage}_own_count", int(valid.sum()), **BOTH)
        self.log(f"{stage}_own_tensor", valid.sum(), **BOTH, sync_dist=True)
        self.log(f"{stage}_own_sum", total, reduce_fx="sum", **BOTH)
        self.log(f"{stage}_own_sum_fx", total, reduce_fx=torch.sum, sync_dist=True, **BOTH)
        self.log(f"{stage}_own_flag", (batch["input_ids"] == batch_idx).any(), **BOTH)
        return loss


@lru_cache(maxsize=1)
def plain() -> Report:
    (want,) = run_ranks(1, watched, None, Kinds, test=False)
    assert not want["told"]
    return want


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [RING, ULYSSES])
def test_values_of_all_kinds_are_those_of_one_process(settings: Any) -> None:
    first, second = run_ranks(2, watched, settings, Kinds, test=False)
    same_reports(first, plain())
    same_reports(second, plain())
    named = [text.split("'")[1] for text in first["told"]]
    own = ("own_count", "own_flag", "own_sum", "own_sum_fx", "own_tensor")
    assert named == [f"{stage}_{name}" for stage in ("train", "val") for name in own]
    assert not second["told"]
    assert "self.cp_log('train_own_count', total, count)" in first["told"][0]


@pytest.mark.nightly
def test_with_data_parallelism_they_are_those_of_plain_ddp() -> None:
    want = run_ranks(2, watched, DDP, Kinds, test=False)
    for rank, report in enumerate(run_ranks(4, watched, RING_TWICE, Kinds, test=False)):
        same_reports(report, want[rank // 2])


class EpochEnds(Logs):
    """Logs in hooks where no batch says how much a rank's value weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_start(self) -> None:
        self.log("same_start", 2.5)
        self.log("own_start", float(self.global_rank))

    def on_train_epoch_start(self) -> None:
        self.log("same_epoch_start", 7)

    def on_train_epoch_end(self) -> None:
        self.log("same", 3.5)
        self.log("same_sum", 3, reduce_fx="sum", sync_dist=True)
        self.log("own", self.losses[0])
        self.log("own_largest", self.losses[0], reduce_fx="max")
        self.log("own_smallest", self.losses[0], reduce_fx=torch.min, sync_dist=True)
        self.log("own_time", self.losses[0], rank_zero_only=True)
        if self.global_rank == 1:
            self.log("second", 8.0)


class Kept(EpochEnds):
    def on_train_end(self) -> None:
        self.found = self.losses


@pytest.mark.nightly
def test_at_epoch_ends_values_that_differ_are_averaged_and_told() -> None:
    first, second = run_ranks(2, watched, RING, Kept, test=False)
    a, b = first["module"][0], second["module"][0]
    assert a != pytest.approx(b)
    seen = [
        {name.split(": ")[1]: x for name, x in report["seen"][-1].items()}
        for report in (first, second)
    ]
    both = {
        "same": 3.5,
        "same_sum": 3.0,
        "own": (a + b) / 2,
        "own_largest": max(a, b),
        "own_smallest": min(a, b),
        "same_start": 2.5,
        "same_epoch_start": 7,
    }
    assert seen[0] == pytest.approx({**both, "own_start": 0.0, "own_time": a}, rel=1e-12)
    assert seen[1] == pytest.approx(
        {**both, "own_start": 1.0, "own_time": b, "second": 8.0}, rel=1e-12
    )
    named = [text.split("'")[1] for text in first["told"]]
    assert named == ["own", "own_start"]
    assert "The plain mean over these ranks is shown." in first["told"][0]
    assert "Each rank shows its own value." in first["told"][1]


class Loaders(Logs):
    """Validates on two loaders; one rank alone logs something, in a hook after backward, too."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def on_after_backward(self) -> None:
        if self.trainer.is_global_zero:
            self.log("alone", 0.5)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.log("alone_too", 1.5, sync_dist=True)

    def val_dataloader(self) -> Any:
        return [loader(4), loader(3)]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val", loss, **BOTH, batch_size=2)
        self.log(f"val_{dataloader_idx}", loss, add_dataloader_idx=False)
        self.cp_log("count", loss.new_ones(()), 1, **BOTH)
        self.cp_log(f"count_{dataloader_idx}", 2.0 * loss.new_ones(()), 1, add_dataloader_idx=False)


def loaders(rank: int, world_size: int, settings: Any) -> tuple[dict[str, float], bool]:
    module = Loaders()
    trainer = trainer_of(world_size, settings)
    trainer.fit(module, loader(4))
    left = {"log", "_context_parallel_log", "on_train_batch_end"} & module.__dict__.keys()
    left |= {"epoch_end_reached"} & trainer._logger_connector.__dict__.keys()
    return {name: float(x) for name, x in trainer.callback_metrics.items()}, bool(left)


@pytest.mark.nightly
def test_several_loaders_and_ranks_that_log_alone() -> None:
    ((want, _),) = run_ranks(1, loaders, None)
    assert "val_epoch/dataloader_idx_1" in want
    (first, left), (second, _) = run_ranks(2, loaders, RING, timeout=30)
    assert not left
    assert first == pytest.approx(want, rel=1e-10)
    alone = {"alone", "alone_too"}
    assert second == pytest.approx({k: x for k, x in want.items() if k not in alone}, rel=1e-10)


class Norms(Logs):
    """Logs what PyTorch makes of sharded gradients: a DTensor."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.log("norm", norm, **BOTH)


@lru_cache(maxsize=1)
def norms_alone() -> Report:
    (want,) = run_ranks(1, watched, None, Norms, test=False)
    return want


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_what_is_spread_over_ranks_is_logged_whole(engine: str) -> None:
    for got in run_ranks(2, watched, {**RING, "data_parallel": engine}, Norms, test=False):
        same_reports(got, norms_alone())


class Mixed(Logs):
    """Where a rank has no targets it logs integers, and plain numbers in the place of ratios."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Two counts."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        losses, mask = self.of_tokens(batch)
        for at, part in enumerate((mask, mask & (batch["input_ids"] % 2 == 0))):
            loss = (losses * part).sum() / self.count_targets(part)
            self.manual_backward(loss, retain_graph=not at)
            self.show(f"train_{at}", loss, part)
        optimizer.step()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        losses, mask = self.of_tokens(batch)
        self.show("val", (losses * mask).sum() / mask.sum().clamp(min=1), mask)

    def of_tokens(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels = self.logits(batch).transpose(1, 2), batch["labels"]
        return F.cross_entropy(logits, labels.clamp(min=0), reduction="none"), labels != -100

    def show(self, name: str, loss: torch.Tensor, mask: torch.Tensor) -> None:
        count = mask.sum()
        self.log(name, loss.detach() if count else 0, batch_size=1)
        self.log(
            f"{name}_largest", loss.detach() if count else False, batch_size=1, reduce_fx="max"
        )
        if count:
            self.cp_log(f"{name}_ratio", loss.detach() * count, count)
        else:
            self.log(f"{name}_ratio", 0.0, batch_size=1)


def mixed(rank: int, world_size: int, settings: Any) -> tuple[dict[str, float], list[str]]:
    rows = samples(20)  # more batches than those whose values are looked at
    for row in rows:
        row["labels"] = row["input_ids"].roll(-1)
        row["labels"][4:] = -100
    data: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(world_size, settings)
        trainer.fit(Mixed(), data, data)
    shown = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return shown, [str(x.message) for x in caught if "self.log" in str(x.message)]


@pytest.mark.quick("ring3")
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (3, RING3), (4, HYBRID)],
    ids=["ring", "ring3", "hybrid"],
)
def test_ranks_that_log_a_name_with_other_kinds(ranks: int, settings: Any) -> None:
    """No rank sends more numbers than another; one without targets has no say."""
    ((want, said),) = run_ranks(1, mixed, None)
    assert not said
    for shown, _ in run_ranks(ranks, mixed, {**settings, "layout": "contiguous"}):
        assert shown == pytest.approx(want, rel=1e-10)
