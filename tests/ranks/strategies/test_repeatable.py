"""The same seed twice: weights are equal bit for bit, however the sequence is shared."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.kinds import fitted
from tests.helpers.strategies.small import HYBRID, RING, ULYSSES, Settings

SETTINGS: dict[str, tuple[int, Settings]] = {
    "ring": (2, RING),
    "ulysses": (2, ULYSSES),
    "hybrid": (4, HYBRID),
    "balanced": (4, {"ring_size": 4, "layout": "balanced"}),
    "zigzag_llama3": (4, {"ring_size": 4, "mode": "zigzag_llama3"}),
    "fused": (
        4,
        {
            "ring_size": 4,
            "mode": "zigzag_llama3",
            "forward_execution": "fused",
            "backward_execution": "fused",
        },
    ),
    "zigzag_llama3 over ulysses": (4, {**HYBRID, "mode": "zigzag_llama3"}),
}


@pytest.mark.quick("ring")
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_seed_twice_gives_the_same_bits(name: str) -> None:
    world_size, settings = SETTINGS[name]
    once, again = (run_ranks(world_size, fitted, settings, "small") for _ in "12")
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, once[0]), "every rank has the same weights"
