"""Every fault that the doctor knows is planted once, and named by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError, ParityError
from lightning_cp.parity.compare import TOLERANCES, Comparison, Difference
from lightning_cp.parity.diagnosis import (
    PLAIN_LOSS,
    Cause,
    Evidence,
    FirstDifference,
    diagnose,
    ill,
)
from lightning_cp.parity.passes import Event
from tests.helpers.models.steps import Case, make_batch
from tests.helpers.parity import modules
from tests.helpers.pool import expect_on_every_rank
from tests.helpers.strategies.small import RING, trainer_of
from tests.helpers.suites import nightly_but
from tests.ranks.parity.test_healthy import MODES, HuggingFace


def fit(rank: int, world_size: int, name: str, settings: dict[str, Any], packed: bool) -> None:
    module = getattr(modules, name)()
    loader = DataLoader(modules.rows(4, packed=packed), batch_size=2)  # type: ignore[arg-type]
    trainer_of(world_size, {"parity_check": "first_batch", **settings}).fit(module, loader)


FAULTS = [
    ("Summed", "unscaled loss", r"all gradients are 0.\d+ times those of one process"),
    ("CountedHere", "local positions", "the output of places .Embedding., which does not depend"),
    ("TurnedHere", "local positions", "before blocks.0.attention.out .* the first rank"),
    ("ShiftedHere", "local labels", "with a loss that takes no labels gradients do too"),
    (
        "FirstHeldBack",
        "a loss that is not a mean over targets",
        r"as many targets as the labels have, and it has another term[^\n]*\n[^\n]*self\.unshard\(x\)",
    ),
    ("Preferred", "a function of sums over sequences", r"for each rank or row.*self\.unshard\(x\)"),
    ("Swelling", "code of training alone", "in evaluation mode both agree|In evaluation"),
    ("Mixed", "a module that mixes the sequence", r"blocks.0.mixing.own"),
    (
        "SummedBefore",
        "a module that mixes the sequence",
        r"within SummedBefore, before blocks.0 .Block.",
    ),
    ("DrawnPerRank", "different data inside the cp group", "whole on every rank, has losses"),
]


@pytest.mark.quick("SummedBefore-ring")
@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("name", "cause", "because"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_faults_are_named(name: str, cause: str, because: str, settings: dict[str, Any]) -> None:
    ranks = settings["ring_size"] * settings["ulysses_size"]
    match = rf"(?s)Likely cause: {cause}\..*{because}"
    expect_on_every_rank(ranks, fit, name, settings, False, error=ParityError, match=match)


@pytest.mark.nightly
def test_labels_that_the_step_shifts_beside_those_that_are_shifted() -> None:
    settings = {**RING, "labels": "shift"}
    match = "Likely cause: local labels"
    expect_on_every_rank(2, fit, "ShiftedHere", settings, False, error=ParityError, match=match)


@pytest.mark.nightly
def test_a_sum_over_targets_that_are_shifted() -> None:
    settings = {**RING, "labels": "shift"}
    match = r"(?s)Likely cause: unscaled loss\..*how many targets its rank has"
    expect_on_every_rank(2, fit, "SummedTargets", settings, False, error=ParityError, match=match)


def test_what_could_not_be_tried_is_not_said() -> None:
    """A plain loss is made of the last output; not every step has one."""
    fine, off = Difference("loss", 0.0, 1e-5), Difference("weight", 0.5, 1e-4)
    numbers: Any = {"factor": 0.7, "residual": 0.3, "spread": 0.0, "first_rank": 0.0}
    base = Comparison(fine, None, (off,), **numbers, tolerance=TOLERANCES[torch.float64])
    for tried, said in (("not possible", "no other loss"), (base, "with a plain loss neither")):
        found = diagnose(Evidence(base, None, {PLAIN_LOSS: tried}, positions_ignored=False))
        assert found.cause is Cause.UNKNOWN
        assert said in found.reason


def test_other_counts_are_said_beside_a_cause_in_the_forward() -> None:
    """Where labels alone explain all, both numbers are the reason that is given."""
    off, fine = Difference("weight", 0.5, 1e-4), Difference("loss", 0.0, 1e-5)
    numbers: Any = {"factor": 0.7, "residual": 0.3, "spread": 0.0, "first_rank": 0.0}
    base = Comparison(fine, None, (off,), **numbers, tolerance=TOLERANCES[torch.float64])
    first_difference = FirstDifference(Event("output", "places", "Embedding"), False, False)
    counts = "a loss counted other targets than its rank is weighted by: 3 on rank 0"
    found = Evidence(base, first_difference, {}, positions_ignored=True, other_counts=counts)
    behind = diagnose(found)
    assert behind.cause is Cause.LOCAL_POSITIONS
    assert f"\nBesides, {counts}. For targets" in ill(base, {}, behind, 58, uneven=False)
    alone = diagnose(replace(found, first_difference=None))
    assert alone.cause is Cause.OTHER_TARGETS
    assert ill(base, {}, alone, 58, uneven=False).count(counts) == 1


def fit_packed(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    """A model whose positions restart where no document begins."""
    case = Case(batch="declared", use_cache=False)
    batch = make_batch(case)
    batch["segment_ids"] = batch["segment_ids"].roll(9, 1).cummax(1).values
    loader: Any = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    checked = {"parity_check": "first_batch", "labels": "auto", **settings}
    trainer_of(world_size, checked).fit(HuggingFace(case), loader)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", nightly_but("hybrid", of=MODES))
def test_documents_of_which_one_process_knows_others(settings: dict[str, Any]) -> None:
    ranks = settings["ring_size"] * settings["ulysses_size"]
    match = "'position_ids' of shape .* restart elsewhere than documents begin by 'segment_ids'"
    expect_on_every_rank(ranks, fit_packed, settings, error=ConfigError, match=match)


def fit_rounded(rank: int, world_size: int, name: str, precision: str) -> None:
    module = getattr(modules, name)(torch.float32)
    loader: Any = DataLoader(modules.rows(4), batch_size=2)  # type: ignore[arg-type]
    settings = {"parity_check": "first_batch", **RING}
    trainer_of(world_size, settings, precision=precision).fit(module, loader)


@pytest.mark.quick("CountedHere-bf16-mixed")
@pytest.mark.parametrize(
    "precision", ["bf16-mixed", pytest.param("bf16-true", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", ["Summed", "CountedHere", "ShiftedHere", "Mixed"])
def test_faults_are_no_rounding(name: str, precision: str) -> None:
    """What rounding alone does is allowed, and no more."""
    cause = {given: cause for given, cause, _ in FAULTS}[name]
    match = f"Likely cause: {cause}"
    expect_on_every_rank(2, fit_rounded, name, precision, error=ParityError, match=match)


def fit_apart(rank: int, world_size: int) -> None:
    """One data rank has padding, the other documents."""
    rows, first = modules.rows(2), rank < 2
    for row in rows:
        row["attention_mask"] = (torch.arange(modules.LENGTH) < (40 if first else 48)).long()
        row["segment_ids"] = (torch.arange(modules.LENGTH) >= (48 if first else 19)).long()
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    settings = {"parity_check": "first_batch", "data_parallel_size": 2, **RING}
    trainer_of(world_size, settings).fit(modules.Summed(), loader)


@pytest.mark.nightly
def test_data_ranks_that_have_other_batches() -> None:
    match = "(?s)no padding  .*(differs|agrees).*Likely cause: unscaled loss"
    expect_on_every_rank(4, fit_apart, error=ParityError, match=match)


def fit_long(rank: int, world_size: int, name: str) -> None:
    rows = [{key: x.repeat(15) for key, x in row.items()} for row in modules.rows(2)]
    module = getattr(modules, name)()
    module.places = torch.nn.Embedding(15 * modules.LENGTH, modules.FEATURES)
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    trainer_of(world_size, {"parity_check": "first_batch", **RING}).fit(module, loader)


@pytest.mark.nightly
def test_a_cause_is_looked_for_in_few_tokens() -> None:
    """All that passes through modules is kept meanwhile."""
    match = r"(?s)parity check on 512 tokens.*Likely cause: local positions"
    expect_on_every_rank(2, fit_long, "CountedHere", error=ParityError, match=match)
