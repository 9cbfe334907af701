"""Merging of partial results: an associative, commutative sum with an identity, and never NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.kernels.merge import Accumulator, batch_rows, merge
from lightning_cp.layout.tiles import ALL_ROWS

Partial = tuple[torch.Tensor, torch.Tensor]
"""out [1, 1, 1, 2] and lse [1, 1, 1]."""

LOG_SUMS = st.one_of(st.just(-torch.inf), st.floats(-1e4, 1e4), st.floats(-3, 3))
OUTPUTS = st.floats(-100, 100, allow_subnormal=False)


@st.composite
def partials(draw: st.DrawFn) -> Partial:
    """A result of one query; 0 if it saw no key."""
    lse = draw(LOG_SUMS)
    values = [draw(OUTPUTS), draw(OUTPUTS)] if lse > -torch.inf else [0.0, 0.0]
    out = torch.tensor(values, dtype=torch.float64)
    return out.view(1, 1, 1, 2), torch.tensor(lse, dtype=torch.float64).view(1, 1, 1)


def merged(*parts: Partial) -> Partial:
    """All parts, merged into the first one by one."""
    out, lse = (x.clone() for x in parts[0])
    for part in parts[1:]:
        merge(out, lse, *part)
    return out, lse


def assert_same(one: Partial, other: Partial) -> None:
    """Equal to rounding; the values are at most 100, so the tolerance is absolute."""
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-10)


def nothing() -> Partial:
    """A query that saw no key."""
    return torch.zeros(1, 1, 1, 2, dtype=torch.float64), torch.full((1, 1, 1), -torch.inf).double()


@given(partials(), partials())
def test_commutative(a: Partial, b: Partial) -> None:
    assert_same(merged(a, b), merged(b, a))


@given(partials(), partials(), partials())
def test_associative(a: Partial, b: Partial, c: Partial) -> None:
    assert_same(merged(merged(a, b), c), merged(a, merged(b, c)))


@given(partials())
def test_no_key_is_the_identity(a: Partial) -> None:
    for result in (merged(a, nothing()), merged(nothing(), a)):
        assert torch.equal(result[0], a[0])
        assert torch.equal(result[1], a[1])


@given(st.lists(partials(), min_size=1, max_size=5))
def test_equals_one_softmax_over_all_and_is_never_nan(parts: list[Partial]) -> None:
    out, lse = merged(*parts)
    log_sums = torch.cat([part[1] for part in parts]).flatten()
    total = log_sums.logsumexp(0)
    weights = torch.where(log_sums == -torch.inf, 0.0, torch.exp(log_sums - total))
    values = torch.cat([part[0] for part in parts]).flatten(0, 2)
    expected = (weights.unsqueeze(-1) * values).nan_to_num(0.0).sum(0)
    assert_same((out, lse), (expected.view_as(out), total.view_as(lse)))
    assert not bool(out.isnan().any() | lse.isnan().any())


def test_two_empty_sides_stay_empty() -> None:
    out, lse = merged(nothing(), nothing())
    assert not bool(out.any())
    assert bool((lse == -torch.inf).all())


def test_lower_precision_is_widened_before_it_is_merged() -> None:
    out, lse = torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 2)
    new = torch.full((1, 2, 1, 4), 1.0 + 2**-7, dtype=torch.bfloat16)
    merge(out, lse, new, torch.zeros(1, 1, 2))
    assert torch.equal(out, torch.full_like(out, (1 + 2**-7) / 2))


def results(rows: int, queries: int) -> Partial:
    generator = torch.Generator().manual_seed(queries)
    return (
        torch.randn(rows, queries, 3, 2, generator=generator),
        torch.randn(rows, 3, queries, generator=generator),
    )


def test_accumulator_takes_a_whole_first_result_as_it_is() -> None:
    state = Accumulator(torch.empty(2, 5, 3, 2), torch.float32)
    out, lse = results(2, 5)
    state.add(ALL_ROWS, 0, out, lse)
    assert state.result(torch.float32)[0].data_ptr() == out.data_ptr()


def test_accumulator_widens_a_first_result_of_lower_precision() -> None:
    """Merged into bfloat16, every hop would round the output again."""
    state = Accumulator(torch.empty(2, 5, 3, 2), torch.float32)
    first, lse = results(2, 5)
    rounded = first.bfloat16()
    want, want_lse = rounded.float(), lse.clone()
    state.add(ALL_ROWS, 0, rounded, lse.clone())
    for seed in (6, 7):
        out, lse = (x[:, :5] if x.dim() == 4 else x[..., :5] for x in results(2, seed))
        state.add(ALL_ROWS, 0, out, lse)
        merge(want, want_lse, out, lse)
    got, got_lse = state.result(torch.float32)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    assert torch.equal(got_lse, want_lse)


def test_accumulator_places_rows_and_queries() -> None:
    state = Accumulator(torch.empty(2, 5, 3, 2), torch.float32)
    out, lse = results(1, 2)
    state.add(1, 3, out, lse)
    got_out, got_lse = state.result(torch.float32)
    assert torch.equal(got_out[1:, 3:], out)
    assert torch.equal(got_lse[1:, :, 3:], lse)
    assert not bool(got_out[:1].any())
    assert not bool(got_out[1:, :3].any())
    assert bool((got_lse[0] == -torch.inf).all())


@pytest.mark.parametrize(("row", "start"), [(1, 1), (0, 0), (ALL_ROWS, 3)])
def test_first_partial_result_is_written_not_merged(
    row: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what it leaves is filled: there memory begins as NaN, and no merge is made."""
    monkeypatch.setattr("lightning_cp.kernels.merge.merge", None)
    for name in ("empty", "empty_permuted"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, own=make, **how: own(*a, **how).fill_(torch.nan)
        )
    state = Accumulator(torch.zeros(2, 5, 3, 2), torch.float32)
    out, lse = results(2 if row == ALL_ROWS else 1, 2)
    state.add(row, start, out, lse)
    want_out, want_lse = torch.zeros(2, 5, 3, 2), torch.full((2, 3, 5), -torch.inf)
    want_out[batch_rows(row), start : start + 2] = out
    want_lse[batch_rows(row), :, start : start + 2] = lse
    got_out, got_lse = state.result(torch.float32)
    assert torch.equal(got_out, want_out)
    assert torch.equal(got_lse, want_lse)


def test_accumulator_without_results() -> None:
    out, lse = Accumulator(torch.empty(2, 5, 3, 2), torch.float64).result(torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert out.shape == (2, 5, 3, 2)
    assert not bool(out.any())
    assert lse.dtype == torch.float64
    assert bool((lse == -torch.inf).all())
    assert lse.shape == (2, 3, 5)


@pytest.mark.parametrize(("row", "rows"), [(ALL_ROWS, [0, 1, 2]), (0, [0]), (2, [2])])
def test_batch_rows(row: int, rows: list[int]) -> None:
    assert [0, 1, 2][batch_rows(row)] == rows
