"""Attention functions that are not sharded are refused within a step, and are themselves outside of it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from lightning_cp.batch.step_state import StepState
from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.models.guards.attention_calls import unsupported_replacements
from lightning_cp.models.handle import SwapHandle, install_replacements
from lightning_cp.models.swap import swap_attention
from tests.unit.models.test_mixing import MESH

X = torch.ones(2, 4, 8, 16)

SOURCE = """
import torch
import torch.nn.attention.flex_attention as file
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.flex_attention import flex_attention as renamed
from flash_attn import flash_attn_func
import flash_attn
from xformers.ops import memory_efficient_attention

compiled = torch.compile(flex_attention, backend="eager")

CALLS = {
    "from import": lambda x: flex_attention(x, x, x),
    "import as": lambda x: renamed(x, x, x),
    "file": lambda x: file.flex_attention(x, x, x),
    "compiled": lambda x: compiled(x, x, x),
    "flash-attn": lambda x: flash_attn_func(x, x, x),
    "flash-attn, file": lambda x: flash_attn.flash_attn_func(x, x, x),
    "xformers": lambda x: memory_efficient_attention(x, x, x),
}
"""


def itself(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A user's file, with stand-ins for packages that are not installed here."""
    for name, function in (
        ("flash_attn", "flash_attn_func"),
        ("xformers", "version"),
        ("xformers.ops", "memory_efficient_attention"),
    ):
        package = types.ModuleType(name)
        own = types.FunctionType(itself.__code__, {}, function)
        setattr(package, function, own)
        monkeypatch.setitem(sys.modules, name, package)
    module = types.ModuleType("users_attention")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE, vars(module))
    return module


@pytest.fixture
def handle() -> Iterator[SwapHandle]:
    handle = SwapHandle(MESH)
    yield handle
    handle.undo()


def begin(handle: SwapHandle) -> None:
    handle.activate(StepState(SequenceLayout(8), torch.arange(8)[None]))


NAMES = {
    **dict.fromkeys(
        ("from import", "import as", "file", "compiled"),
        "torch.nn.attention.flex_attention.flex_attention",
    ),
    **dict.fromkeys(("flash-attn", "flash-attn, file"), "flash_attn.flash_attn_func"),
    "xformers": "xformers.ops.memory_efficient_attention",
}


@pytest.mark.parametrize("call", NAMES)
def test_calls_within_a_step_are_refused(
    call: str, user: types.ModuleType, handle: SwapHandle
) -> None:
    want = {name: function(X) for name, function in user.CALLS.items()}
    before = dict(vars(user))
    install_replacements(handle, unsupported_replacements)
    begin(handle)
    with pytest.raises(ConfigError, match=f"{NAMES[call]} was called within a step"):
        user.CALLS[call](X)
    handle.deactivate()
    assert torch.equal(user.CALLS[call](X), want[call])
    handle.undo()
    assert {name for name, value in vars(user).items() if value is not before[name]} == set()
    assert torch.equal(user.CALLS[call](X), want[call])


def test_later_swaps_may_be_undone_first(user: types.ModuleType) -> None:
    first, second = SwapHandle(MESH), SwapHandle(MESH)
    own = user.flash_attn_func
    install_replacements(first, unsupported_replacements)
    install_replacements(second, unsupported_replacements)
    first.undo()
    begin(second)
    with pytest.raises(ConfigError, match=r"flash_attn_func was called"):
        user.flash_attn_func(X, X, X)
    second.undo()
    assert user.flash_attn_func is own


class Pools(nn.Module):
    """Calls PyTorch's function of the whole module, which computes by itself where weights are asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(16, 4)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.inside
        weights = (own.in_proj_weight, own.in_proj_bias, None, None, False, 0.0)
        out = (own.out_proj.weight, own.out_proj.bias)
        return F.multi_head_attention_forward(x, x, x, 16, 4, *weights, *out, **self.options)[0]


@pytest.mark.parametrize("options", [{}, {"need_weights": True}])
def test_weights_of_the_function_are_refused(options: dict[str, bool]) -> None:
    model = Pools(**options)
    handle = swap_attention(model, MESH)
    begin(handle)
    try:
        with pytest.raises(ConfigError, match=r"multi_head_attention_forward .* need_weights=True"):
            model(torch.ones(8, 2, 16))
    finally:
        handle.undo()


def test_what_is_left_alone_may_call_them(user: types.ModuleType) -> None:
    class Crosses(nn.Module):
        context_parallel_local = True
        call: Callable[[torch.Tensor], torch.Tensor] = staticmethod(user.CALLS["from import"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call(x)

    model = nn.Sequential(Crosses())
    want = flex_attention(X, X, X)
    handle = swap_attention(model, MESH)
    begin(handle)
    try:
        assert torch.equal(model(X), want)
    finally:
        handle.undo()
