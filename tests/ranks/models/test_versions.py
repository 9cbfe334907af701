"""Families that are refused with older versions of transformers, and exact with later ones."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle
from lightning_cp.models.hf.swap import swap_hf
from tests.helpers.models.later import COMES_WITH, LATER, is_refused, transformers_version
from tests.helpers.models.steps import Case, make_model, parallel
from tests.helpers.pool import expect_on_every_rank
from tests.ranks.models.test_windows import compare


@pytest.mark.quick("opt", "modernbert")
@pytest.mark.parametrize("family", LATER)
def test_families_that_come_later(family: str) -> None:
    case, match = Case(model=family), LATER[family].match
    if is_refused(family):
        expect_on_every_rank(2, parallel, case, 1, 2, error=ConfigError, match=match, timeout=20)
    else:
        compare(case, 1, 2)


@pytest.mark.parametrize("family", COMES_WITH)
def test_families_are_missing_before_the_version_they_come_with(family: str) -> None:
    """Elsewhere they are skipped then."""
    is_there = find_spec(f"transformers.models.{family}") is not None
    assert is_there == (transformers_version() >= COMES_WITH[family])


class CountingRotary(nn.Module):
    """As ESM's and Evolla's, until transformers 5.5."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k


def test_rotary_embeddings_that_count_their_own_rows_are_refused() -> None:
    model, mesh = make_model(Case()), cast(Any, None)
    model.model.layers[1].self_attn.rotary = CountingRotary()
    with pytest.raises(ConfigError, match="CountingRotary of LlamaForCausalLM takes no positions"):
        swap_hf(model, SwapHandle(mesh))
