"""Tensors without values: what may be done with them, and that it takes neither memory nor random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.checkpoint.pretrained.meta_init import placeholder_like

HUGE = (2**30, 2**10)
"""4 TiB, which no machine has."""


def huge() -> Any:
    x = nn.Parameter(torch.empty(HUGE, device="meta"), requires_grad=False)
    return placeholder_like(x, torch.device("cpu"), "weight")


WRITES: dict[str, Callable[[Any], object]] = {
    "normal_": nn.init.normal_,
    "uniform_": nn.init.uniform_,
    "constant_": lambda x: nn.init.constant_(x, 3.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "chained": lambda x: x.uniform_(-1, 1).erfinv_().mul_(2.0).add_(1.0).clamp_(min=0.0),
    "data": lambda x: x.data.normal_(mean=0.0, std=0.02),
    "row": lambda x: x.data[3].zero_(),
    "rows": lambda x: x[:3].copy_(torch.ones(3, HUGE[1])),
    "set item": lambda x: x.__setitem__(slice(1, 3), 2.0),
    "set items": lambda x: x.__setitem__([1, 3], 2.0),
    "parts": lambda x: [part.normal_() for part in x.chunk(4)],
    "turned": lambda x: x.detach().t().view(HUGE[1], -1).zero_(),
    "several": lambda x: torch._foreach_zero_([x, x]),
    "out": lambda x: torch.ones(HUGE, out=x),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_takes_neither_memory_nor_random_numbers(name: str) -> None:
    x, before = huge(), torch.get_rng_state()
    with torch.no_grad():
        WRITES[name](x)
    assert torch.equal(before, torch.get_rng_state())


def test_what_needs_no_values_is_as_of_any_tensor() -> None:
    x = huge()
    assert isinstance(x, nn.Parameter)
    assert (x.shape, x.dtype, x.device) == (HUGE, torch.float32, torch.device("cpu"))
    assert x.new_zeros(2).tolist() == [0.0, 0.0]
    assert torch.zeros_like(x[0, :3]).tolist() == [0.0] * 3
    assert torch.arange(2, device=x.device).to(x).tolist() == [0.0, 1.0]
    assert "weight" in repr(x)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: torch.ones(()).copy_(x[0, 0]),
        lambda x: x[0, 0].item(),
        lambda x: x + 1,
        lambda x: x.norm(),
        lambda x: x[:3].clone(),
        lambda x: x.double(),
        lambda x: torch.cat([x, x]),
    ],
)
def test_a_read_is_refused_by_name(read: Callable[[Any], object]) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="weight has no values then"):
        read(huge())
