"""The strategy's ``exchange`` reaches attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError
from tests.helpers.kernels.flash_attn_standin import deterministic_flags
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import RING, Small, samples, trainer_of
from tests.ranks.attention.test_ring_flash_attn import needs_package, on_cpu


class Half(Small):
    """In bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


def fit(rank: int, world_size: int, exchange: str, module: type[Small]) -> tuple[Any, int]:
    """The weights after three steps, and how often flash-attn's backward was called."""
    data: Any = DataLoader(samples(6, length=32), batch_size=2)  # type: ignore[arg-type]
    deterministic_flags.clear()
    model = module()
    with on_cpu():
        trainer_of(world_size, {**RING, "exchange": exchange, "parity_check": "off"}).fit(
            model, data
        )
    parameters = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    return parameters, len(deterministic_flags)


@pytest.mark.nightly
@needs_package
def test_delegated_training_is_like_our_own() -> None:
    ours, theirs = (run_ranks(2, fit, name, Half)[0] for name in ("ring", "ring_flash_attn"))
    assert ours[1] == 0
    assert theirs[1] == 3 * 2  # steps, hops
    start = torch.cat([p.detach().flatten().double() for p in Half().parameters()])
    moved = (ours[0] - start).norm()
    assert float((theirs[0] - ours[0]).norm()) < 0.05 * float(moved)


def test_a_precision_that_it_gets_wrong_is_refused_on_every_rank() -> None:
    match = "exchange='ring_flash_attn' cannot do torch.float64.*Use exchange='ring'"
    expect_on_every_rank(2, fit, "ring_flash_attn", Small, error=ConfigError, match=match)


@pytest.fixture(autouse=True)
def _default_dtype() -> Any:
    yield
    torch.set_default_dtype(torch.float32)
