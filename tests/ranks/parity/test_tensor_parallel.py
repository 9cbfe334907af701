"""The check where ranks share layers: each sees a part of each gradient, and all come to one verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp.errors import ParityError
from tests.helpers.models.steps import Case, make_batch
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import RING, trainer_of
from tests.ranks.parity.test_healthy import CHECKED, Heard, HuggingFace, worst

SHARED: dict[str, Any] = {**RING, **CHECKED, "data_parallel": "fsdp", "tensor_parallel_size": 2}


class Summed(HuggingFace):
    """Its loss grows with what a rank has."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * batch["input_ids"].shape[1]


def fit(rank: int, world_size: int, kind: type[HuggingFace]) -> list[str]:
    module = kind(Case(use_cache=False))
    data: Any = DataLoader([make_batch(Case())], batch_size=None)  # type: ignore[arg-type]
    with Heard() as heard:
        trainer_of(world_size, {**SHARED, "labels": "auto"}).fit(module, data)
    return heard.parity


def test_a_model_that_is_well() -> None:
    lines = run_ranks(4, fit, HuggingFace, timeout=60)
    assert worst(lines[0][0]) < 1e-5


@pytest.mark.nightly
def test_a_fault_is_named_on_every_rank() -> None:
    match = "Likely cause: unscaled loss"
    expect_on_every_rank(4, fit, Summed, error=ParityError, match=match)
