"""Weights of the examples of losses on several ranks: one process's with the API, and others without it."""

from __future__ import annotations

import pytest

from benchmarks.row_losses import MODELS, RANKS, changes


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_one_process(name: str, ranks: int) -> None:
    before, want = changes(name, 1)
    moved = (want - before).norm()
    assert (changes(name, ranks)[1] - want).norm() < 1e-10 * moved
    assert (changes(name, ranks, without=True)[1] - want).norm() > 1e-3 * moved
