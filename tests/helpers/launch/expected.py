"""The weights and losses that every way to start must come to."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_cp import UlyssesRingStrategy
from tests.helpers.launch.scripts.model import QUIET, Tiny, text, weights
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import alone as never_heard_of_others

Result = dict[str, Any]
MODES: dict[str, Result] = {
    "ulysses": {"mode": "ulysses"},
    "ring": {"mode": "ring"},
    "two nodes": {"ulysses_size": 2, "ring_size": 2},
}
"""What mode="auto" comes to on one node, on two nodes of one rank each, and on two of two."""


def fitted(rank: int, world_size: int, mode: str) -> Result:
    """Trained on ranks that stand already; one of them is a Trainer without any strategy."""
    module = Tiny()
    strategy = UlyssesRingStrategy(**MODES[mode])
    options: Result = {"strategy": strategy, "plugins": [PoolEnvironment()]}
    if world_size == 1:
        never_heard_of_others()
        options = {}
    pl.Trainer(devices=world_size, **options, **QUIET).fit(module, text())
    return {"weights": weights(module), "losses": module.losses}


@lru_cache(maxsize=8)
def expected(world_size: int = 2, mode: str = "ulysses") -> Result:
    """What standing ranks come to, which must be what one process does."""
    first, *others = run_ranks(world_size, fitted, mode)
    for other in others:
        same(other, first)
    if world_size > 1:
        alone = expected(1)  # transformers computes the norms and the loss in float32
        torch.testing.assert_close(first["weights"], alone["weights"], rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(first["losses"], alone["losses"], rtol=1e-6, atol=0)
    else:
        assert not torch.equal(first["weights"], weights(Tiny())), "nothing was trained"
    return first


def same(got: Result, want: Result) -> None:
    """Bit for bit."""
    assert torch.equal(got["weights"], want["weights"])
    assert got["losses"] == want["losses"]


def came_to_the_same(folder: Path, world_size: int = 2, mode: str = "ulysses") -> None:
    """Every rank has left what was expected, and there are no others."""
    left = {path.name: torch.load(path) for path in folder.glob("rank*.pt")}
    assert set(left) == {f"rank{rank}.pt" for rank in range(world_size)}
    for result in left.values():
        same(result, expected(world_size, mode))


def fitted_twice(rank: int, world_size: int) -> torch.Tensor:
    """The weights after two Trainers, one after the other."""
    module = Tiny()
    for _ in range(2):
        options: Result = {"strategy": "ulysses_ring", "plugins": [PoolEnvironment()]}
        pl.Trainer(devices=world_size, **options, **QUIET).fit(module, text())
    return weights(module)


@lru_cache(maxsize=1)
def expected_of_two_fits() -> torch.Tensor:
    """The same after two."""
    first, second = run_ranks(2, fitted_twice)
    assert torch.equal(first, second)
    assert not torch.equal(first, expected()["weights"])
    return first
