"""Owners have about equal work, and hold no more at once than they may."""

from __future__ import annotations

import pytest

from lightning_cp.optim.newton_schulz import newton_schulz_flops
from lightning_cp.optim.work_list import MatrixCost, assign_owners, split_into_rounds

Q, K, UP = (4096, 4096), (1024, 4096), (14336, 4096)
LLAMA_8B = [Q, K, K, Q, UP, UP, UP[::-1]]
"""Of a layer: q, k, v, o, gate, up, down. 32 of them."""


def sizes() -> list[MatrixCost]:
    return [MatrixCost(newton_schulz_flops(*x), 2 * x[0] * x[1]) for x in LLAMA_8B * 32]


def imbalance(owners: list[int], ranks: int) -> float:
    """The largest work of a rank, by the mean."""
    work = [0] * ranks
    for one, owner in zip(sizes(), owners, strict=True):
        work[owner] += one.flops
    return max(work) * ranks / sum(work)


@pytest.mark.parametrize("ranks", [8, 64])
def test_llama_8b(ranks: int) -> None:
    loads: dict[int, int] = {}
    owners = assign_owners(sizes(), list(range(ranks)), loads)
    assert imbalance(owners, ranks) <= 1.1
    assert sum(loads.values()) == sum(one.flops for one in sizes())


def test_in_turn_would_not_do() -> None:
    """So the list tells ways apart."""
    assert imbalance([at % 64 for at in range(len(sizes()))], 64) > 1.1


def test_what_was_given_before_counts() -> None:
    loads = {7: 10, 8: 0}
    owners = assign_owners([MatrixCost(4, 1), MatrixCost(4, 1), MatrixCost(4, 1)], [7, 8], loads)
    assert owners == [1, 1, 1]
    assert loads == {7: 10, 8: 12}


@pytest.mark.parametrize("most", [1, 100 << 20, 300 << 20, 1 << 40])
def test_rounds_hold_no_more_than_they_may(most: int) -> None:
    every = sizes()
    owners = assign_owners(every, list(range(8)), {})
    found = split_into_rounds(every, owners, most)
    placed = [at for each in found for matrices in each.values() for at in matrices]
    assert sorted(placed) == list(range(len(every)))
    for each in found:
        for owner, matrices in each.items():
            assert all(owners[at] == owner for at in matrices)
            assert len(matrices) == 1 or sum(every[at].nbytes for at in matrices) <= most
    if most == 1 << 40:
        assert len(found) == 1


def test_flops_of_the_products() -> None:
    """Three products in each step, of the shorter side s and the longer one l."""
    assert newton_schulz_flops(3, 5, 1) == 2 * 3 * 3 * 5 + 2 * 3 * 3 * 3 + 2 * 3 * 3 * 5
    assert newton_schulz_flops(5, 3, 5) == 5 * newton_schulz_flops(3, 5, 1)
