"""Factors of tokens' gradients: one for each row or document, or another one for each token."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.parity.compare import TOLERANCES, _is_shared

DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
SIZES = pytest.mark.parametrize("tokens", [12, 4096])


@DTYPES
@SIZES
def test_factors_of_each_token_are_not_shared(dtype: torch.dtype, tokens: int) -> None:
    factors = torch.randn(tokens, 1, generator=torch.Generator().manual_seed(0))
    assert not _is_shared(factors, TOLERANCES[dtype])


@DTYPES
@SIZES
def test_factors_of_rows_are_shared(dtype: torch.dtype, tokens: int) -> None:
    of_rows = torch.randn(tokens // 6, 1, generator=torch.Generator().manual_seed(0))
    assert _is_shared(of_rows.repeat_interleave(6, 0), TOLERANCES[dtype])


def test_few_tokens_are_of_one_sequence() -> None:
    assert _is_shared(torch.ones(0, 1), TOLERANCES[torch.float64])
    assert _is_shared(torch.ones(1, 1), TOLERANCES[torch.float64])
