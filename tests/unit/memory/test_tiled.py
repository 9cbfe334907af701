"""A module in tiles of tokens against the same module at once, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.step_memory import PeakBytes
from lightning_cp.errors import ConfigError
from lightning_cp.memory.tiled_mlp import run_in_tiles

ROWS, LENGTH, FEATURES, WIDE = 2, 23, 8, 32


class Gated(nn.Module):
    """Two inputs, a weight that is used twice, a frozen one, one without a use, and one whose gradient is its
    neighbour's very tensor."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, WIDE)
        self.down = nn.Linear(WIDE, FEATURES, bias=False)
        self.frozen = nn.Linear(FEATURES, WIDE).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.shift, self.other = (nn.Parameter(torch.zeros(FEATURES)) for _ in range(2))
        self.drop = drop

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        inside = F.silu(self.up(x)) * self.frozen(x) + self.up(x)
        out = F.dropout(self.down(inside), self.drop, self.training)
        return out + (self.shift + self.other) + residual


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randn(ROWS, LENGTH, FEATURES, generator=draw).to(dtype).requires_grad_()
        for _ in range(2)
    ]


def gradients(module: Any, size: int, given: list[torch.Tensor]) -> dict[str, Any]:
    """Of every parameter and input, and the output; a size of 0 is without tiles."""
    out = run_in_tiles(module, module.forward, given, size) if size else module(*given)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    named = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), **{str(at): x.grad for at, x in enumerate(given)}, **named}


def module(dtype: torch.dtype = torch.float64, drop: float = 0.0) -> Gated:
    torch.manual_seed(2)
    return Gated(drop).to(dtype)


def differences(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Relative, by name; where one has no gradient the other may not have one."""
    found: dict[str, float] = {}
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert (x is None) == (got[name] is None), name
        if x is not None:
            found[name] = float((got[name].double() - x.double()).norm() / x.double().norm())
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 14, 2 * LENGTH, 1000])
def test_values_and_gradients_are_those_without_tiles(size: int) -> None:
    found = differences(gradients(module(), size, inputs()), gradients(module(), 0, inputs()))
    assert max(found.values()) < 1e-14, found


def test_rows_without_a_batch_and_an_input_that_needs_nothing() -> None:
    def rows() -> list[torch.Tensor]:
        x, residual = (one.detach().flatten(0, 1) for one in inputs())
        return [x, residual.requires_grad_()]

    found = differences(gradients(module(), 5, rows()), gradients(module(), 0, rows()))
    assert max(found.values()) < 1e-14, found


def test_recomputation_draws_the_numbers_of_the_forward() -> None:
    """Where an output was dropped, nothing comes back; the generator goes on as after the forward."""
    own, given = module(drop=0.5), inputs()
    torch.manual_seed(5)
    out = run_in_tiles(own, own.forward, given, 6)
    after = torch.get_rng_state()
    own.shift.data += 0.0
    kept = (out - given[1]).abs() > 1e-12
    assert 0.2 < kept.double().mean() < 0.8
    (x_grad,) = torch.autograd.grad((out - given[1])[~kept].sum(), given[0])
    assert not x_grad.any(), "the same outputs were dropped again"
    assert torch.equal(torch.get_rng_state(), after)


def test_bfloat16_sums_over_many_tiles_are_float32() -> None:
    """No further from float64 than without tiles."""
    half = module().bfloat16()
    exact = copy.deepcopy(half).double()
    want = gradients(exact, 0, [x.detach().bfloat16().double().requires_grad_() for x in inputs()])
    plain = differences(gradients(copy.deepcopy(half), 0, inputs(torch.bfloat16)), want)
    tiled = differences(gradients(copy.deepcopy(half), 2, inputs(torch.bfloat16)), want)
    for name, error in tiled.items():
        assert error <= 1.5 * plain[name] + 1e-6, (name, error, plain[name])


def test_autocast_holds_in_backward_too() -> None:
    """Which runs outside of it."""

    def run(size: int) -> dict[str, Any]:
        own, given = module(torch.float32), inputs(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            out = run_in_tiles(own, own.forward, given, size) if size else own(*given)
        out.float().square().sum().backward()
        named = {name: p.grad for name, p in own.named_parameters()}
        return {"0": given[0].grad, **named}

    found = differences(run(6), run(0))
    assert max(found.values()) < 1e-2, found
    assert max(found.values()) > 0, "both are bfloat16 inside, but sums differ"
    wide = gradients(module(torch.float32), 6, inputs(torch.float32))["up.weight"]
    assert float((run(6)["up.weight"] - wide).norm()) > 0


def test_hooks_see_each_gradient_once_and_whole() -> None:
    own = module()
    seen: list[torch.Tensor] = []
    arrived: list[nn.Parameter] = []
    own.up.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    own.up.weight.register_post_accumulate_grad_hook(arrived.append)  # type: ignore[arg-type]
    got = gradients(own, 3, inputs())["up.weight"]
    want = gradients(module(), 0, inputs())["up.weight"]
    torch.testing.assert_close(seen, [want])
    torch.testing.assert_close(got, 2 * want)
    assert len(arrived) == 1


def test_without_gradients_nothing_is_kept() -> None:
    own, given = module(), inputs()
    with torch.no_grad():
        out = run_in_tiles(own, own.forward, given, 5)
        torch.testing.assert_close(out, own(*given))
    assert not out.requires_grad


def test_what_is_held_does_not_grow_with_what_is_inside() -> None:
    """[B, L, WIDE] tensors are neither kept nor ever whole."""
    own, given = module(), inputs()
    inside = ROWS * LENGTH * WIDE * 8
    with PeakBytes() as plain:
        gradients(own, 0, given)
    with PeakBytes() as tiled:
        gradients(own, ROWS, given)
    parameters = sum(p.nbytes for p in own.parameters())
    outside = 8 * given[0].nbytes  # out, its gradient, the inputs' and what the test makes
    assert plain.peak > 3 * inside
    assert tiled.peak < outside + 3 * parameters


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (lambda x, _: (x, x), "returned tuple"),
        (lambda x, _: x.sum(1), r"returned \[2, 8\]"),
    ],
    ids=["a tuple", "a sum over tokens"],
)
def test_what_cannot_be_put_together(result: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run_in_tiles(module(), result, inputs(), 5)
