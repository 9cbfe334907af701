"""Random numbers of tokens do not make the host wait; their tensors are plain ones here."""

from __future__ import annotations

import torch
from torch import nn

from lightning_cp.randomness.token_draws import StepTokens, TokenDims, TokenDraws
from tests.helpers.pretended.device import PretendedDevice


def test_positions_of_tokens_travel_without_a_wait() -> None:
    draws = TokenDraws(nn.Linear(2, 2))
    with PretendedDevice(0).use() as device:
        draws.begin(StepTokens(torch.arange(4, 8), rows=2))
        seed = torch.zeros((), dtype=torch.int64, device=device.device)
        keys = draws.keys(seed, TokenDims(0, 1), (2, 4))
        assert not device.waits
        assert keys.cpu().unique().numel() == 8
