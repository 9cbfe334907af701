"""The norm of many tensors as one vector, and the search for one without a finite norm."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_cp.utils import tensors as module
from lightning_cp.utils.tensors import has_infinite_norm, total_norm


@pytest.mark.parametrize("widened", [module.WIDENED, 4])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_tensors_of_several_dtypes_are_one_vector(
    p: float, widened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WIDENED", widened)
    torch.manual_seed(0)
    tensors = [
        torch.randn(7, 5),
        torch.randn(7, 5).T,
        torch.randn(3).double() * 4,
        torch.randn(11).bfloat16(),
        torch.randn(0),
        torch.randn(2, 2),
    ]
    want = torch.linalg.vector_norm(torch.cat([x.double().flatten() for x in tensors]), p)
    found = total_norm(iter(tensors), p)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, want, rtol=1e-14, atol=0)


def test_small_numbers_of_half_precision_do_not_underflow() -> None:
    x = torch.full((4,), 1e-4, dtype=torch.float16)
    assert float(total_norm([x])) == pytest.approx(2 * float(x[0]), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_that_is_not_finite_shows(bad: float, dtype: torch.dtype) -> None:
    tensors = [torch.ones(3), torch.tensor([1.0, bad], dtype=dtype), torch.ones(2).double()]
    assert not total_norm(tensors).isfinite()
    assert has_infinite_norm(tensors)
    assert not has_infinite_norm(tensors[::2])


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e30), (torch.float64, 1e200)])
def test_squares_may_overflow(dtype: torch.dtype, large: float) -> None:
    """Who asks looks at every entry then."""
    assert has_infinite_norm([torch.ones(2), torch.full((2,), large, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_squares_of_a_narrow_dtype_do_not_overflow(dtype: torch.dtype) -> None:
    assert not has_infinite_norm([torch.full((4,), 6e4, dtype=dtype)])


def test_without_any_entry_it_is_zero() -> None:
    assert float(total_norm([])) == float(total_norm([torch.zeros(0)])) == 0
    assert not has_infinite_norm([])
    assert not has_infinite_norm([torch.zeros(0)])
