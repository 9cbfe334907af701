"""Muon on every sharding: numbers of one process, by an independent float64 one and by torch.optim.Muon."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_cp.optim import Muon
from tests.helpers.optim.by_hand import ByHand
from tests.helpers.optim.shardings import SHARDINGS, give, gradients, sharded, weights, whole
from tests.helpers.pool import run_ranks

STEPS = 20
QUICK = ("plain", "ddp 4", "fsdp 2", "fsdp 4", "hsdp 2x2", "tp 2", "fsdp+tp 2x2", "hsdp+tp 2x2x2")
EVERY = [x if x in QUICK else pytest.param(x, marks=pytest.mark.nightly) for x in SHARDINGS]
MATRICES = [
    f"layers.{at}.{part}.weight" for at in (0, 1) for part in ("up_proj", "down_proj", "odd", "few")
]


def trained(
    rank: int, world_size: int, sharding: str, dtype: torch.dtype, ns_dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The weights after all steps."""
    model = sharded(sharding, dtype)
    optimizer = Muon(model.named_parameters(), lr=0.02, ns_dtype=ns_dtype, chunk_mib=1e-3)
    for step in range(STEPS):
        give(model, gradients(whole(dtype), step))
        optimizer.step()
    return weights(model)


def by_hand() -> dict[str, np.ndarray]:
    model = whole(torch.float64)
    hand = ByHand({n: x.numpy() for n, x in weights(model).items()}, MATRICES)
    for step in range(STEPS):
        hand.step({n: x.numpy() for n, x in gradients(model, step).items()})
    return hand.now


def by_torch() -> dict[str, torch.Tensor]:
    """PyTorch's own two optimizers, in one process."""
    model = whole(torch.float32)
    named = dict(model.named_parameters())
    matrices = [named[n] for n in MATRICES]
    others = [p for n, p in named.items() if n not in MATRICES]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(STEPS):
        give(model, gradients(model, step))
        for optimizer in (muon, adamw):
            optimizer.step()
    return weights(model)


@pytest.fixture(scope="module")
def hand() -> dict[str, np.ndarray]:
    return by_hand()


@pytest.mark.quick("plain", "fsdp 2", "hsdp 2x2", "tp 2")
@pytest.mark.parametrize("sharding", EVERY)
def test_numbers_are_those_of_one_process(sharding: str, hand: dict[str, np.ndarray]) -> None:
    ranks = math.prod(SHARDINGS[sharding])
    every = run_ranks(ranks, trained, sharding, torch.float64, torch.float64)
    for found in every:
        for name, want in hand.items():
            assert np.abs(found[name].numpy() - want).max() <= 1e-12 * np.abs(want).max(), name


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sharding",
    [x if x == "fsdp+tp 2x2" else pytest.param(x, marks=pytest.mark.nightly) for x in SHARDINGS],
)
def test_float32(sharding: str, hand: dict[str, np.ndarray]) -> None:
    """Within 1e-6 of float64, and to the last bit what one process computes."""
    ranks = math.prod(SHARDINGS[sharding])
    (alone,) = run_ranks(1, trained, "plain", torch.float32, torch.float32)
    for found in run_ranks(ranks, trained, sharding, torch.float32, torch.float32):
        assert all(torch.equal(found[name], alone[name]) for name in hand)
        for name, want in hand.items():
            assert np.abs(found[name].numpy() - want).max() <= 1e-6 * np.abs(want).max(), name


@pytest.mark.quick("plain", "hsdp 2x2")
@pytest.mark.parametrize("sharding", EVERY)
def test_bit_for_bit_what_torch_computes_in_one_process(sharding: str) -> None:
    """In bfloat16: what is gathered has one layout, whatever was sharded."""
    ranks = math.prod(SHARDINGS[sharding])
    want = by_torch()
    for found in run_ranks(ranks, trained, sharding, torch.float32, torch.bfloat16):
        assert all(torch.equal(found[name], want[name]) for name in want)
