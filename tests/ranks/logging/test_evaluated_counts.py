"""Values that a step of evaluation logs: those whose loss counted other targets than the batch's labels are
warned of once; those that are right are one process's, without a word."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.runs import HFModule, Run, make_data
from tests.helpers.strategies.runs import loader as loader_of
from tests.helpers.strategies.small import (
    HYBRID,
    LENGTH,
    RING,
    RING3,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    Small,
    loader,
    samples,
    trainer_of,
)

GRIDS = {"ring": (2, RING), "ulysses": (2, ULYSSES), "ring3": (3, RING3), "hybrid": (4, HYBRID)}
WEIGHTS = torch.linspace(0.1, 2, VOCAB, dtype=torch.float64)


class Evaluates(ContextParallelMixin, Small):
    """Logs what a function of ``KINDS`` makes of logits and targets."""

    context_parallel_labels = "aligned"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits, labels = self.logits(batch).flatten(0, 1), batch["labels"].flatten()
        KINDS[self.kind](self, logits, labels, batch["input_ids"].flatten())

    test_step = validation_step


Step = Callable[[Evaluates, torch.Tensor, torch.Tensor, torch.Tensor], None]


def subset(labels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.where(ids % 3 == 0, labels, -100)


def ce(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits, labels, **options)


def two(step: Evaluates, logits: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> None:
    """A right value beside a wrong one."""
    step.log("val", ce(logits, labels), batch_size=1)
    step.log("part", ce(logits, subset(labels, ids)), batch_size=1)


def chunks(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    parts = zip(logits.chunk(3), labels.chunk(3), strict=True)
    total = sum(ce(x, y, reduction="sum") for x, y in parts)
    return torch.as_tensor(total) / (labels != -100).sum().clamp(min=1)


def by_token(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, L] each: losses, also of tokens without a label, and which have one."""
    losses = ce(logits, labels.clamp(min=0), reduction="none")
    return losses.view(2, -1), (labels != -100).to(losses).view(2, -1)


def by_row(logits: torch.Tensor, labels: torch.Tensor, fewest: int = 0) -> torch.Tensor:
    """The mean over rows of each one's mean."""
    losses, mask = by_token(logits, labels)
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=fewest)).mean()


def masked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses, mask = by_token(logits, labels)
    return (losses * mask).sum() / mask.sum()


def whole_rows(s: Evaluates, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
    losses, mask = map(s.unshard, by_token(x, y))
    log(s, ((losses * mask).sum(1) / mask.sum(1)).mean())


def ratio_of_part(s: Evaluates, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
    part = subset(y, ids)
    total, count = ce(x, part, reduction="sum"), (part != -100).sum()
    s.cp_log("part", total, count)
    s.log("val", ce(x, y) * 0.5, batch_size=1)


def declared(s: Evaluates, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
    part = subset(y, ids)
    s.count_targets(part != -100)
    s.log("val", ce(x, part), batch_size=1)


def of_classes(s: Evaluates, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
    count = (WEIGHTS[y.clamp(min=0)] * (y != -100)).sum()
    s.cp_log("val", ce(x, y, weight=WEIGHTS, reduction="sum"), count)


def log(s: Evaluates, value: Any) -> None:
    s.log("val", value, batch_size=1)


KINDS: dict[str, Step] = {
    # right
    "mean": lambda s, x, y, ids: log(s, ce(x, y)),
    "number": lambda s, x, y, ids: log(s, ce(x, y).item()),
    "module": lambda s, x, y, ids: log(s, nn.CrossEntropyLoss()(x, y)),
    "nll": lambda s, x, y, ids: log(s, F.nll_loss(x.log_softmax(-1), y)),
    "smooth": lambda s, x, y, ids: log(s, ce(x, y, label_smoothing=0.1)),
    "half": lambda s, x, y, ids: log(s, ce(x, y) * 0.5),
    "by hand": lambda s, x, y, ids: log(s, ce(x, y, reduction="sum") / (y != -100).sum()),
    "masked by hand": lambda s, x, y, ids: log(s, masked(x, y)),
    "whole rows": whole_rows,
    "chunks": lambda s, x, y, ids: log(s, chunks(x, y)),
    "alike weights": lambda s, x, y, ids: log(s, ce(x, y, weight=torch.full_like(WEIGHTS, 2))),
    "ratio": ratio_of_part,
    "ratio of classes": of_classes,
    "declared": declared,
    "same on all": lambda s, x, y, ids: log(s, 2.5),
    # wrong
    "sum": lambda s, x, y, ids: log(s, ce(x, y, reduction="sum")),
    "scaled sum": lambda s, x, y, ids: log(s, ce(x, y, reduction="sum") / 100),
    "sum over all": lambda s, x, y, ids: log(s, ce(x, y, reduction="sum") / y.numel()),
    "subset": lambda s, x, y, ids: log(s, ce(x, subset(y, ids))),
    "subset of nll": lambda s, x, y, ids: log(s, F.nll_loss(x.log_softmax(-1), subset(y, ids))),
    "classes": lambda s, x, y, ids: log(s, ce(x, y, weight=WEIGHTS)),
    "beside": two,
    "rows": lambda s, x, y, ids: log(s, by_row(x, y)),
    "rows of at least one": lambda s, x, y, ids: log(s, by_row(x, y, 1)),
    "half of rows": lambda s, x, y, ids: log(s, by_row(x, y) * 0.5),
    "sum by hand": lambda s, x, y, ids: log(s, by_token(x, y)[0][y.view(2, -1) != -100].sum()),
    "twice a subset": lambda s, x, y, ids: log(s, 2 * ce(x, subset(y, ids))),
}
WRONG = {
    "sum": r"'val', ...\) in validation_step was given a sum over targets .*self\.sequence_sum\(",
    "scaled sum": r"self.log\('val', ...\) in validation_step was given a sum over targets",
    "sum over all": r"self.log\('val', ...\) in validation_step was given a sum over targets",
    "subset": r"'val', ...\) in validation_step was given a mean over other targets .*\(\d+(, \d+)+ on",
    "subset of nll": r"'val', ...\) in validation_step was given a mean over other targets",
    "classes": r"'val', ...\) in validation_step was given a mean over other targets",
    "beside": r"self.log\('part', ...\) in validation_step was given a mean over other targets",
    "rows": r"'val', ...\) in validation_step was given a mean over rows .*\.sequence_mean\(.*\.unshard",
    "rows of at least one": r"'val', ...\) in validation_step was given a mean over rows",
    "half of rows": r"'val', ...\) in validation_step was given a mean over rows",
    "sum by hand": r"self.log\('val', ...\) in validation_step was given a sum over targets",
    "twice a subset": r"a loss function in validation_step counted \d+(, \d+)+ targets .*maybe 'val'",
}
RIGHT = [kind for kind in KINDS if kind not in WRONG]


Shown = dict[str, tuple[dict[str, float], list[str]]]


def evaluated(rank: int, world_size: int, settings: Settings | None, kinds: list[str]) -> Shown:
    """By kind: what is shown after two batches, and said of it."""
    found: Shown = {}
    for kind in kinds:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = trainer_of(world_size, settings)
            (logged,) = trainer.validate(Evaluates(kind), loader(4), verbose=False)
        said = [str(x.message) for x in caught if "self.log" in str(x.message)]
        found[kind] = {name: float(x) for name, x in logged.items()}, said
    return found


@lru_cache
def in_one_process() -> Shown:
    return run_ranks(1, evaluated, None, list(KINDS))[0]


@pytest.mark.nightly
@pytest.mark.parametrize("grid", GRIDS)
def test_right_values_without_a_word(grid: str) -> None:
    ranks, settings = GRIDS[grid]
    for found in run_ranks(ranks, evaluated, settings, RIGHT):
        for kind, (shown, said) in found.items():
            assert shown == pytest.approx(in_one_process()[kind][0], rel=1e-10), kind
            assert not said, kind


@pytest.mark.nightly
@pytest.mark.parametrize("grid", GRIDS)
def test_values_that_count_something_else_are_said_once(grid: str) -> None:
    ranks, settings = GRIDS[grid]
    first, *others = run_ranks(ranks, evaluated, settings, list(WRONG))
    for kind, match in WRONG.items():
        shown, said = first[kind]
        assert shown != pytest.approx(in_one_process()[kind][0], rel=1e-10), f"{kind} is right"
        assert len(said) == 1, (kind, said)
        assert re.search(match, said[0]), (kind, said)
        assert not any(other[kind][1] for other in others)


def of_hugging_face(
    rank: int, world_size: int, settings: Settings | None
) -> tuple[float, list[str]]:
    torch.manual_seed(2)
    module = HFModule(Run(model="hf", rows=1))
    options = None if settings is None else {**settings, "labels": "auto"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(world_size, options)
        trainer.validate(module, loader_of(make_data(Run())[:4], 1), verbose=False)
    said = [str(x.message) for x in caught if "self.log" in str(x.message)]
    return float(trainer.callback_metrics["val_loss"]), said


@pytest.mark.nightly
@pytest.mark.parametrize("grid", GRIDS)
def test_the_loss_of_a_hugging_face_model_without_a_word(grid: str) -> None:
    ranks, settings = GRIDS[grid]
    ((want, _),) = run_ranks(1, of_hugging_face, None)
    for shown, said in run_ranks(ranks, of_hugging_face, settings):
        assert shown == pytest.approx(want, rel=1e-6)
        assert not said


class Logs(ContextParallelMixin, Small):
    """Logs a value by hand beside a right one, in every stage."""

    context_parallel_labels = "aligned"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        logits, labels = self.logits(batch).flatten(0, 1), batch["labels"].flatten()
        self.log("own", BY_HAND[self.kind](logits, labels).detach(), batch_size=1, on_epoch=True)
        loss = ce(logits, labels)
        self.log("right", loss.detach(), batch_size=1, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


ByHand = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_row_unseen(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Without a loss function of PyTorch."""
    mask = (labels != -100).to(logits).view(2, -1)
    nll = -logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None]).view(2, -1)
    return ((nll * mask).sum(1) / mask.sum(1)).mean()


def diverged(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return by_row(logits * torch.nan, labels)


def by_vmap(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over targets, beside the loss of a gradient that PyTorch's function transforms take."""
    torch.func.grad(lambda x: ce(x, labels))(logits.detach())
    torch.func.vmap(lambda x, y: ce(x[None], y[None]))(logits.detach(), labels)
    each = torch.func.vmap(lambda x, y: ce(x[None], y[None], reduction="sum"))(logits, labels)
    return each.sum() / (labels != -100).sum()


BY_HAND: dict[str, ByHand] = {
    "by_row": by_row,
    "unseen": by_row_unseen,
    "diverged": diverged,
    "by_vmap": by_vmap,
}


def uneven_rows(some: int, last: int = 0) -> DataLoader[Any]:
    """Two batches of two rows: in the second one the first row has targets among its first tokens alone, and
    the second row among its ``last``, if that is given."""
    rows = samples(4)
    for row in rows:
        row["labels"] = row["input_ids"].roll(-1)
    rows[2]["labels"][some:] = -100
    rows[3]["labels"][: LENGTH - last if last else 0] = -100
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def logged(
    rank: int, world_size: int, settings: Settings | None, kind: str, train: bool, last: int
) -> tuple[dict[str, float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, data = trainer_of(world_size, settings), uneven_rows(4, last)
        module = Logs(kind)
        trainer.fit(module, data) if train else trainer.validate(module, data, verbose=False)
    said = [str(x.message) for x in caught if "self.log" in str(x.message)]
    shown = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return shown, said


@pytest.mark.quick("ring-by_row-0-validates", "ring-unseen-0-trains")
@pytest.mark.parametrize("train", [True, False], ids=["trains", "validates"])
@pytest.mark.parametrize("last", [0, 4])
@pytest.mark.parametrize("kind", ["by_row", "unseen"])
@pytest.mark.parametrize("grid", GRIDS)
def test_rows_without_targets_on_a_rank_are_said(
    grid: str, kind: str, last: int, train: bool
) -> None:
    """One process has a number; where every rank has such a row, loss functions tell that it has."""
    ranks, settings = GRIDS[grid]
    ((want, _),) = run_ranks(1, logged, None, kind, train, last)
    assert want["own"] == want["own"]
    first, *others = run_ranks(
        ranks, logged, {**settings, "layout": "contiguous"}, kind, train, last
    )
    shown, said = first
    assert shown["right"] == pytest.approx(want["right"], rel=1e-10)
    assert shown["own"] != pytest.approx(want["own"], rel=1e-10)
    seen = kind == "by_row" or not last
    match = "(got NaN from rank|was given a mean over rows).*self.unshard"
    assert [bool(re.search(match, text)) for text in said] == [True] * seen, said
    assert not any(told for _, told in others)


@pytest.mark.parametrize("train", [False])
def test_a_model_that_gives_nan_is_not_explained(train: bool) -> None:
    for _, said in run_ranks(2, logged, RING, "diverged", train, 0):
        assert not said


@pytest.mark.nightly
@pytest.mark.parametrize("train", [True, False], ids=["trains", "validates"])
def test_losses_within_function_transforms_leave_nothing(train: bool) -> None:
    """A tensor of a transform is dead once that has ended."""
    ((want, _),) = run_ranks(1, logged, None, "by_vmap", train, 0)
    for shown, said in run_ranks(2, logged, RING, "by_vmap", train, 0):
        assert shown == pytest.approx(want, rel=1e-10)
        assert not said
