"""Families x modes x batches: gradients are those of one process (``python -m tests.nightly.models``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.models.handle import SwapHandle
from tests.helpers.models.later import as_parameters
from tests.helpers.models.matrix import (
    BATCHES,
    FAMILIES,
    FLOAT32,
    MODES,
    Cell,
    case_of,
    cell,
    ranks,
    whole_sequence,
    worst,
)
from tests.helpers.models.steps import Case, Outcome
from tests.helpers.pool import run_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:position_ids restart, so the documents of a row attend only to themselves"
)
QUICK = {
    "llama": "hybrid 2x2",
    "deepseek_v3": "hybrid 2x2",
    "gemma2_capped": "ring 4",
    "bloom": "ulysses 4",
}
"""In every run; the others with ``-m slow``."""


def require(found: Cell, model: str) -> None:
    """As close as the model's insides allow; NaN is not close."""
    assert found.reference <= (1e-6 if model in FLOAT32 else 1e-9)
    assert found.loss <= (1e-6 if model in FLOAT32 else 1e-9)
    assert found.eager <= 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("model", QUICK)
def test_some_families(model: str) -> None:
    require(cell(model, QUICK[model], ("right", "packed")), model)


@pytest.mark.quick("bloom-ring 4", "falcon_new-ring 4", "falcon_alibi-ring 4")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", as_parameters(FAMILIES))
def test_every_family(model: str, mode: str) -> None:
    require(cell(model, mode, BATCHES), model)


# -- the comparison can tell ------------------------------------------------------------------------


def without_exchange(
    self: SwapHandle, q_BLHD: torch.Tensor, k_BLKD: Any, v_BLKD: Any, spec: AttentionSpec
) -> torch.Tensor:
    """Each rank attends to its own tokens."""
    assert self.state is not None
    self.state.calls += 1
    scores = torch.einsum("blhd,bmhd->bhlm", q_BLHD, _as_many(k_BLKD, q_BLHD))
    if spec.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    weights = (scores * spec.scale(q_BLHD.shape[3])).softmax(-1)
    return torch.einsum("bhlm,bmhd->blhd", weights, _as_many(v_BLKD, q_BLHD))


def _as_many(x_BLKD: torch.Tensor, q_BLHD: torch.Tensor) -> torch.Tensor:
    return x_BLKD.repeat_interleave(q_BLHD.shape[2] // x_BLKD.shape[2], dim=2)


def zeros(
    self: SwapHandle, q_BLHD: torch.Tensor, k_BLKD: Any, v_BLKD: Any, spec: AttentionSpec
) -> torch.Tensor:
    """Attention that is not computed, with a graph."""
    assert self.state is not None
    self.state.calls += 1
    return (q_BLHD + k_BLKD.sum() + v_BLKD.sum()) * 0


WRONG = {"no exchange": without_exchange, "zeros": zeros}


def wrong_ranks(rank: int, world_size: int, case: Case, how: str) -> Outcome:
    own = SwapHandle.attention
    SwapHandle.attention = WRONG[how]  # type: ignore[method-assign]
    try:
        return ranks(rank, world_size, case, 1, 4)
    finally:
        SwapHandle.attention = own  # type: ignore[method-assign]


@pytest.mark.nightly
@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("batch", BATCHES)
def test_wrong_attention_is_no_cell(batch: str, how: str) -> None:
    case = case_of("llama", batch)
    want = whole_sequence(case)
    for got in run_ranks(4, wrong_ranks, case, how, timeout=60):
        assert worst(got, want) > 1e-2
        assert abs(got.loss - want.loss) > 1e-5 * abs(want.loss)
