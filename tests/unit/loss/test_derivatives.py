"""Derivatives of a loss by values of whole sequences, as of the engine for such leaves, and by sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules._functions import BackwardHookFunction

from lightning_cp.loss.derivatives import derivatives, token_sums
from lightning_cp.loss.terms import loss_terms
from lightning_cp.utils.autograd_notes import Origin, note_origin

Loss = Callable[..., torch.Tensor]


class Cubes(torch.autograd.Function):
    """A user's function with two outputs, a number, and a tensor that needs no gradient."""

    @staticmethod
    def forward(
        ctx: Any, number: float, fixed: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x**3, x.detach() * 2 + number * fixed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return None, None, gradients[0] * 3 * x**2 + gradients[1] * 2


def raw(seed: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, dtype=torch.float64, generator=draws)


def noted(x: torch.Tensor, origin: Origin = Origin.SEQUENCE) -> torch.Tensor:
    note_origin(x, origin)
    return x


def own_mean() -> torch.Tensor:
    """A mean over a rank's own targets."""
    logits = noted(nn.Parameter(raw(5)) * 2, Origin.TOKENS)
    return F.cross_entropy(logits, torch.tensor([1, -100, 2]))


WEIGHT = nn.Parameter(raw(6)[0])

LOSSES: dict[str, Loss] = {
    "sum": lambda z, _: z.sum(),
    "used twice": lambda z, _: (z.exp() - z).mean() + 0.5 * z.square().sum(),
    "broadcast": lambda z, y: ((z.sum(1) - y.sum(0)[:1]) ** 2).mean(),
    "of a scalar": lambda z, y: (z - y.mean()).tanh().sum() / 7,
    "another dtype": lambda z, y: (z.float() * 3).sum() + (y.bfloat16() + 1).float().mean(),
    "unbind": lambda z, y: -F.logsigmoid(z.sum(1).unbind()[0] - y.sum(1).unbind()[2]),
    "slice": lambda z, _: z[:, 1:3].square().sum() + z[0].sum(),
    "index": lambda z, _: z[torch.tensor([0, 2, 2])].square().mean(),
    "product": lambda z, y: (z @ y.T).logsumexp(1).mean(),
    "classes": lambda z, _: F.cross_entropy(z, torch.tensor([0, 3, 1])),
    "where": lambda z, y: torch.where(y > 0, z, y).clamp(-0.5, 0.7).sum(),
    "parameter": lambda z, _: (z @ WEIGHT).square().mean(),
    "own function": lambda z, _: Cubes.apply(3.0, raw(7), z)[0].mean(),  # type: ignore[index]
    "hook": lambda z, _: BackwardHookFunction.apply(z * 2, z.exp())[1].sum(),  # type: ignore[index]
    "beside a mean": lambda z, _: own_mean() + 0.1 * z.square().mean(),
    "stack": lambda z, y: torch.stack([z.mean(), own_mean(), y.sum()]).sum() / 3,
}


def by_whole_values(loss: torch.Tensor) -> list[torch.Tensor]:
    terms = loss_terms(loss)
    found = derivatives(loss, terms.gathered, terms.between)
    return [x for of_outputs in found for x in of_outputs if x is not None]


@pytest.mark.parametrize("of", LOSSES.values(), ids=LOSSES)
def test_they_are_those_of_the_engine(of: Loss) -> None:
    leaves = [raw(1).requires_grad_(), raw(2).requires_grad_()]
    want = torch.autograd.grad(of(*leaves), leaves, allow_unused=True)
    parameters = [nn.Parameter(raw(1)), nn.Parameter(raw(2)), WEIGHT]
    loss = of(*(noted(x * 1) for x in parameters[:2])) + 0.5 * WEIGHT.square().sum()
    found = by_whole_values(loss)
    assert all(x.grad is None for x in parameters)
    wanted = [x for x in want if x is not None]
    assert len(found) == len(wanted)
    for x in wanted:  # in the order of the graph
        assert any(x.dtype == y.dtype and torch.allclose(x, y, rtol=1e-12) for y in found)
    loss.backward()  # the graph is as it was
    WEIGHT.grad = None


def test_other_values_are_held_constant() -> None:
    """A mean of rows that acts on its own, and through tokens from which another one is made."""
    leaf, other = raw(1)[:, 0].requires_grad_(), raw(2)[:, 0].requires_grad_()
    loss = leaf.square().sum() + other.exp().sum()
    want = torch.autograd.grad(loss, [leaf, other])
    first = noted(nn.Parameter(raw(1)[:, 0]) * 1)
    tokens = noted(first.unsqueeze(1) * raw(3), Origin.TOKENS)
    second = noted(tokens.sum(1) * 0 + raw(2)[:, 0])
    loss = first.square().sum() + second.exp().sum()
    found = by_whole_values(loss)
    for x in want:
        assert any(torch.allclose(x, y, rtol=1e-12) for y in found)
    assert len(found) == 2


def test_a_factor_of_a_rank_s_own_is_in_them() -> None:
    z = noted(nn.Parameter(raw(1)) * 1)
    loss = own_mean() * z.mean()
    assert loss_terms(loss).products
    (found,) = by_whole_values(loss)
    torch.testing.assert_close(found, torch.full_like(z, float(own_mean().detach()) / 12))


OF_ROWS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
SUMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[Any]]] = {
    "sum": (lambda x: x.sum() / 6, [1.0]),
    "mean": (lambda x: x.mean(), [0.5]),
    "mean of rows": (lambda x: x.mean(1) @ OF_ROWS, [(OF_ROWS * 1.5).tolist()]),
    "chosen": (lambda x: x[x > 0].sum() / 6, [1.0]),
    "chunks": (lambda x: (x[:, :1].sum() + x[:, 1:].sum() * 2) / 6, [2.0, 1.0]),
    "root": (lambda x: (x.sum() / 6 + 9 - x.sum().detach() / 6).sqrt(), [1 / 6]),
    "features": (lambda x: x.unsqueeze(2).expand(3, 4, 5).mean(2).sum() / 6, [1.0]),
    "targets": (lambda x: F.cross_entropy(x, torch.tensor([1, -100, 2])), [3.0]),
    "squares": (lambda x: F.mse_loss(x, raw(9)), [0.5]),
    "parameters": (lambda x: x.sum() / 6 + WEIGHT.square().sum(), [1.0]),
    "classes of rows": (
        lambda x: x.sum() / 6 + F.cross_entropy(noted(x * 2), torch.tensor([1, 0, 2])),
        [1.0],
    ),
    "whole rows": (lambda x: x.sum() / 6 + noted(x * 2).sum(1).square().mean(), [1.0]),
}


@pytest.mark.parametrize(("of", "want"), SUMS.values(), ids=SUMS)
def test_weights_of_tokens_times_six_targets(
    of: Callable[[torch.Tensor], torch.Tensor], want: list[Any]
) -> None:
    loss = of(noted(nn.Parameter(raw(1)) * 1, Origin.TOKENS))
    sums = token_sums(loss, rows=3, local_len=4)
    assert sums.is_complete
    assert not sums.is_short
    assert not sums.functions
    found = sums.weights(loss, 6)
    assert [x.tolist() for x in found] == [pytest.approx(x) for x in want]


@pytest.mark.parametrize(
    ("of", "function"),
    [
        (lambda x: x.norm() / 6, "LinalgVectorNorm"),
        (lambda x: x.logsumexp((0, 1)), "Logsumexp"),
        (lambda x: x.max(), "Max"),
        (lambda x: x.std(1).sum(), "Std"),
    ],
    ids=["norm", "logsumexp", "max", "std"],
)
def test_other_functions_of_tokens_are_named(
    of: Callable[[torch.Tensor], torch.Tensor], function: str
) -> None:
    sums = token_sums(of(noted(nn.Parameter(raw(1)) * 1, Origin.TOKENS)), rows=3, local_len=4)
    assert sums.functions == [function]


@pytest.mark.parametrize(
    "of",
    [lambda x: Cubes.apply(3.0, raw(7), x.sum())[0], lambda x: x[0, -1] * 2 + x.sum() / 6],
    ids=["own function", "one token"],
)
def test_what_is_beside_sums_is_known(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    loss = of(noted(nn.Parameter(raw(1)) * 1, Origin.TOKENS))
    assert not token_sums(loss, rows=3, local_len=4).is_complete


@pytest.mark.parametrize(
    ("of", "is_short"),
    [
        (lambda x: x.bfloat16().sum().float() / 6, True),
        (lambda x: (x.sum().bfloat16() / 6).float(), True),
        (lambda x: x.bfloat16().float().sum() / 6, False),
    ],
    ids=["sum", "division", "values"],
)
def test_short_numbers_between_the_loss_and_sums(
    of: Callable[[torch.Tensor], torch.Tensor], is_short: bool
) -> None:
    loss = of(noted(nn.Parameter(raw(1).float()) * 1, Origin.TOKENS))
    assert token_sums(loss, rows=3, local_len=4).is_short == is_short
