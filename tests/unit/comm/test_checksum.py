"""The checksum of a batch: it sees values, their order and their bits, in every dtype."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.comm.consensus import checksum, fingerprint

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def example(dtype: torch.dtype) -> torch.Tensor:
    """0 and 1 in two different rows."""
    return (torch.arange(24) % 5 == 1).to(dtype).view(2, 12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_changes_it(dtype: torch.dtype) -> None:
    x = example(dtype)
    sums = {checksum(x)}
    for at in range(x.numel()):
        changed = x.clone()
        changed.view(-1)[at] = 1 - int(changed.view(-1)[at].real)
        sums.add(checksum(changed))
    assert len(sums) == x.numel() + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_order_changes_it(dtype: torch.dtype) -> None:
    x = example(dtype)
    assert checksum(x) != checksum(x.roll(1))
    assert checksum(x) != checksum(x.flip(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distance", [1, 2, 3, 1024, 2048, 4096])
def test_swapping_two_values_changes_it(dtype: torch.dtype, distance: int) -> None:
    x = torch.zeros(5000).to(dtype)
    x[7] = 2 if dtype != torch.bool else 1
    y = torch.zeros_like(x)
    y[7 + distance] = x[7]
    assert checksum(x) != checksum(y)


@pytest.mark.nightly
@given(
    st.lists(st.floats(width=64, allow_nan=False), min_size=1, max_size=40),
    st.data(),
)
def test_one_float64_changes_it(values: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    value = data.draw(st.floats(width=64, allow_nan=False))
    x = torch.tensor(values, dtype=torch.float64)
    y = x.clone()
    y[at] = value
    same_bits = bool((x.view(torch.int64) == y.view(torch.int64)).all())
    assert (checksum(x) == checksum(y)) == same_bits


@pytest.mark.nightly
@given(st.permutations(list(range(12))))
def test_a_permutation_of_token_ids_changes_it(order: list[int]) -> None:
    ids = torch.arange(12) * 37 % 101
    assert (checksum(ids[order]) == checksum(ids)) == (order == list(range(12)))


@pytest.mark.nightly
@given(st.lists(st.booleans(), min_size=2, max_size=24), st.randoms(use_true_random=False))
def test_a_shuffled_mask_changes_it(mask: list[bool], chance: random.Random) -> None:
    shuffled = chance.sample(mask, len(mask))
    same = checksum(torch.tensor(mask)) == checksum(torch.tensor(shuffled))
    assert same == (mask == shuffled)


@pytest.mark.nightly
def test_many_batches_have_as_many_checksums() -> None:
    """All rows of 10 tokens out of 3: places whose factors were linear would collide in thousands."""
    rows = torch.cartesian_prod(*[torch.arange(3)] * 10)
    picked = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:5000]]
    assert len({checksum(row) for row in picked}) == 5000


def test_bits_not_values() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.full((3,), torch.nan)) == checksum(torch.full((3,), torch.nan))


def test_memory_layout_does_not_matter() -> None:
    x = torch.randn(6, 5)
    assert checksum(x.t()) == checksum(x.t().contiguous())
    assert checksum(x.requires_grad_()) == checksum(x.detach())


def test_empty_and_single_values() -> None:
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor(3)) == checksum(torch.tensor([3]))


def test_a_fingerprint_is_equal_across_processes() -> None:
    assert fingerprint("causal") == 2189979323
    assert fingerprint(b"causal") != fingerprint("causal")
    assert 0 <= fingerprint(("a", 1.5, None)) < 2**32
