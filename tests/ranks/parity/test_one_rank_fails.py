"""A step of which one rank's part fails while the check runs: all ranks end, and that one shows why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError, RankFailure
from tests.helpers.parity import modules
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING, ULYSSES, trainer_of
from tests.ranks.parity.test_healthy import CHECKED

WHO = 1


class FailsOnOneRank(modules.Healthy):
    """Before it calls its model, or after; with an error of ours or of Python's."""

    def __init__(self, place: str, kind: type[Exception]) -> None:
        super().__init__()
        self.place, self.kind = place, kind

    def _fail(self, place: str) -> None:
        if place == self.place and self.global_rank == WHO and self._is_sharded:
            raise self.kind("of one rank")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._is_sharded = batch["input_ids"].shape[1] < modules.LENGTH
        self._fail("before")
        loss = super().training_step(batch, batch_idx)
        self._fail("after")
        return loss


def fit(rank: int, world_size: int, place: str, kind: type[Exception], settings: Any) -> str:
    loader: Any = DataLoader(modules.rows(8), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises((kind, RankFailure)) as found:
        trainer_of(world_size, {**RING, **CHECKED, **settings}).fit(
            FailsOnOneRank(place, kind), loader
        )
    return f"{type(found.value).__name__}: {found.value}"


WAYS: dict[str, tuple[int, Any]] = {
    "ring": (2, {}),
    "two groups": (4, {"context_parallel_size": 2, "data_parallel_size": 2}),
    "ulysses": (2, ULYSSES),
    "fsdp": (2, {"data_parallel": "fsdp"}),
}
CASES = [
    (way, place, kind)
    for way in WAYS
    for place in ("before", "after")
    for kind in (ConfigError, ValueError)
    # there the others wait for parameters until that rank's process ends: tests/ranks/launch/test_errors.py
    if (way, place) != ("fsdp", "before")
]


@pytest.mark.quick("ring-before-ConfigError", "ring-after-ValueError")
@pytest.mark.parametrize(("way", "place", "kind"), CASES)
def test_all_ranks_end(way: str, place: str, kind: type[Exception]) -> None:
    ranks, settings = WAYS[way]
    got = run_ranks(ranks, fit, place, kind, settings, timeout=60)
    assert f"{kind.__name__}: of one rank" in got[WHO]
    for other in (got[0], *got[WHO + 1 :]):
        assert other.startswith("RankFailure: ")
        assert "of one rank" in other
