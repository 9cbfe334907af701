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

from lightning_cp import ContextParallelMixin
from tests.pool import run_ranks
from tests.strategies.runs import HFModule, Run, make_data
from tests.strategies.runs import loader as loader_of
from tests.strategies.small import (
    HYBRID,
    RING,
    RING3,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    Small,
    loader,
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
    "twice a subset": lambda s, x, y, ids: log(s, 2 * ce(x, subset(y, ids))),
}
WRONG = {
    "sum": r"self.log\('val', ...\) in validation_step was given a sum over targets",
    "scaled sum": r"self.log\('val', ...\) in validation_step was given a sum over targets",
    "sum over all": r"self.log\('val', ...\) in validation_step was given a sum over targets",
    "subset": r"'val', ...\) in validation_step was given a mean over other targets .*\(\d+(, \d+)+ on",
    "subset of nll": r"'val', ...\) in validation_step was given a mean over other targets",
    "classes": r"'val', ...\) in validation_step was given a mean over other targets",
    "beside": r"self.log\('part', ...\) in validation_step was given a mean over other targets",
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


@pytest.mark.quick("ring")
@pytest.mark.parametrize("grid", GRIDS)
def test_right_values_without_a_word(grid: str) -> None:
    ranks, settings = GRIDS[grid]
    for found in run_ranks(ranks, evaluated, settings, RIGHT):
        for kind, (shown, said) in found.items():
            assert shown == pytest.approx(in_one_process()[kind][0], rel=1e-10), kind
            assert not said, kind


@pytest.mark.quick("ring", "ulysses")
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


@pytest.mark.quick("ring")
@pytest.mark.parametrize("grid", GRIDS)
def test_the_loss_of_a_hugging_face_model_without_a_word(grid: str) -> None:
    ranks, settings = GRIDS[grid]
    ((want, _),) = run_ranks(1, of_hugging_face, None)
    for shown, said in run_ranks(ranks, of_hugging_face, settings):
        assert shown == pytest.approx(want, rel=1e-6)
        assert not said
