"""Where memory is taken, and whose tensors ranks exchange: a group of NCCL takes none of the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_cp.checkpoint.pretrained.load import _device, _exchange_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def on(device: torch.device) -> nn.Module:
    """A plain model of which a part is on the meta device, and the rest on one that need not be there."""
    model = nn.Module()
    model.first = nn.Linear(2, 2, device="meta")
    with FakeTensorMode():
        model.second = nn.Parameter(torch.empty(2, device=device))
    return model


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_plain_model_says_where_it_is(device: torch.device) -> None:
    found = _device(on(device), None, None)
    assert (found, _exchange_device(on(device), found)) == (device, device)


def test_a_model_without_memory_goes_where_it_is_told() -> None:
    model = nn.Linear(2, 2, device="meta")
    assert _device(model, None, None) == CPU
    assert _device(model, None, "cuda") == _exchange_device(model, CUDA) == CUDA
    assert _exchange_device(model, CPU) == CPU


def test_ranks_exchange_what_their_model_is_made_of() -> None:
    assert _device(on(CUDA), None, "cpu") == CPU
    assert _exchange_device(on(CUDA), CPU) == CUDA
    assert _exchange_device(on(CPU), CUDA) == CUDA
