"""Families x modes x batches: gradients are those of one process (``python -m tests.models``: a table)."""

from __future__ import annotations

import pytest

from tests.models.matrix import BATCHES, FAMILIES, FLOAT32, MODES, Cell, cell

pytestmark = pytest.mark.filterwarnings(
    "ignore:position_ids restart, so the documents of a row attend only to themselves"
)
QUICK = {"llama": "hybrid 2x2", "gemma2_capped": "ring 4", "bloom": "ulysses 4"}
"""In every run; the others with ``-m slow``."""


def require(found: Cell, model: str) -> None:
    """As close as the model's insides allow; NaN is not close."""
    assert found.reference <= (1e-6 if model in FLOAT32 else 1e-9)
    assert found.loss <= (1e-6 if model in FLOAT32 else 1e-9)
    assert found.eager <= 1e-5


@pytest.mark.parametrize("model", QUICK)
def test_some_families(model: str) -> None:
    require(cell(model, QUICK[model], ("right", "packed")), model)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", FAMILIES)
def test_every_family(model: str, mode: str) -> None:
    require(cell(model, mode, BATCHES), model)
