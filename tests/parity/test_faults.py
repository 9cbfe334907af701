"""Every fault that the doctor knows is planted once, and named by it."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_cp.errors import ParityError
from tests.models.steps import Case, make_batch
from tests.parity import modules
from tests.parity.test_healthy import HuggingFace
from tests.pool import expect_on_every_rank
from tests.strategies.small import HYBRID, RING, ULYSSES, trainer_of


def fit(rank: int, world_size: int, name: str, settings: dict[str, Any], packed: bool) -> None:
    module = getattr(modules, name)()
    loader = DataLoader(modules.rows(4, packed=packed), batch_size=2)  # type: ignore[arg-type]
    trainer_of(world_size, {"parity_check": "first_batch", **settings}).fit(module, loader)


FAULTS = [
    ("Summed", "unscaled loss", r"all gradients are 0.\d+ times those of one process"),
    ("CountedHere", "local positions", "the output of places .Embedding., which does not depend"),
    ("TurnedHere", "local positions", "before blocks.0.attention.out .* the first rank"),
    ("ShiftedHere", "local labels", "with a loss that takes no labels gradients do too"),
    ("Mixed", "a module that mixes the sequence", r"blocks.0.mixing.own"),
    (
        "SummedBefore",
        "a module that mixes the sequence",
        r"within SummedBefore, before blocks.0 .Block.",
    ),
    ("DrawnPerRank", "different data inside the cp group", "whole on every rank, has losses"),
]


@pytest.mark.parametrize("settings", [RING, ULYSSES, HYBRID], ids=["ring", "ulysses", "hybrid"])
@pytest.mark.parametrize(("name", "cause", "because"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_faults_are_named(name: str, cause: str, because: str, settings: dict[str, Any]) -> None:
    ranks = settings["ring_size"] * settings["ulysses_size"]
    match = rf"(?s)Likely cause: {cause}\..*{because}"
    expect_on_every_rank(ranks, fit, name, settings, False, error=ParityError, match=match)


def fit_packed(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    """A model whose positions restart where no document begins."""
    case = Case(batch="declared", use_cache=False)
    batch = make_batch(case)
    batch["segment_ids"] = batch["segment_ids"].roll(9, 1).cummax(1).values
    loader: Any = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    checked = {"parity_check": "first_batch", "labels": "auto", **settings}
    trainer_of(world_size, checked).fit(HuggingFace(case), loader)


@pytest.mark.parametrize("settings", [RING, ULYSSES, HYBRID], ids=["ring", "ulysses", "hybrid"])
def test_documents_of_which_one_process_knows_others(settings: dict[str, Any]) -> None:
    ranks = settings["ring_size"] * settings["ulysses_size"]
    match = "Likely cause: cross-document attention"
    expect_on_every_rank(ranks, fit_packed, settings, error=ParityError, match=match)
