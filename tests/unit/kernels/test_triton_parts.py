"""Single functions of the device code of our Triton kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from lightning_cp.kernels.triton.launch import FAR
from tests.helpers.kernels.devices import DEVICES

BLOCK = 4
COUNT = 1 << 12


def part(name: str) -> Any:
    """A kernel; importing it imports Triton."""
    from tests.helpers.kernels import triton_parts

    return getattr(triton_parts, name)


def check_edges(case: list[int], edges: list[int]) -> None:
    """Every pair that is seen is in some part, and the middle part has nothing else."""
    begin, end, first, last, near, far = case
    start, whole, cut, stop = edges
    block = range(first, last)
    seen = [t for t in range(begin, end) if any(near <= t - i <= far for i in block)]
    if not seen:
        assert all(a >= b for a, b in pairwise(edges))
        return
    assert (start, stop) == (seen[0], seen[-1] + 1)
    assert start <= whole <= cut <= stop
    assert (cut - whole) % BLOCK == 0
    by_all = [t for t in seen if all(near <= t - i <= far for i in block)]
    assert set(range(whole, cut)) <= set(by_all)
    assert len(by_all) - (cut - whole) < 2 * BLOCK, "whole blocks are taken for cut ones"


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
def test_what_a_block_meets(device: str) -> None:
    edges_of = part("edges_of")
    reaches = [(-FAR, FAR)] + [(-FAR, far) for far in range(-9, 10)]
    reaches += [(near, near + width) for near in range(-9, 10, 2) for width in (0, 1, 5, 12)]
    cases = [[2, 19, 5, last, *reach] for reach in reaches for last in (6, 8, 9)]
    edges = torch.empty(len(cases), 4, dtype=torch.int32, device=device)
    table = torch.tensor(cases, dtype=torch.int32, device=device)
    edges_of[(len(cases),)](table, edges, BLOCK=BLOCK)
    for case, found in zip(cases, edges.tolist(), strict=True):
        check_edges(case, found)


@pytest.mark.parametrize("device", DEVICES)
def test_tanh_of_small_and_large(device: str) -> None:
    tanh_of = part("tanh_of")
    x = torch.cat([torch.linspace(-12, 12, COUNT // 2), torch.logspace(-12, 1, COUNT // 2)])
    x = x.to(device)
    y = torch.empty_like(x)
    tanh_of[(1,)](x, y, COUNT=COUNT)
    want = torch.tanh(x.double())
    assert float(((y.double() - want) / want).abs().max()) < 1e-6
