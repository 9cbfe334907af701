"""The loss contract: scaled losses average to the mean over targets, and nothing adds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from lightning_cp.errors import ConfigError, NonFiniteError
from lightning_cp.loss.weighting import (
    average_weights,
    check_connected,
    check_zero_loss,
    loss_scale,
    zero_loss,
)

counts = st.lists(st.integers(0, 50), min_size=1, max_size=8)


# -- weights ----------------------------------------------------------------------------------------


@given(st.lists(counts, min_size=1, max_size=4).filter(lambda d: len({len(c) for c in d}) == 1))
def test_the_mean_of_scaled_losses_is_the_mean_over_targets(
    groups: Sequence[Sequence[int]],
) -> None:
    """Data ranks are averaged equally; inside a cp group every target counts the same."""
    generator = torch.Generator().manual_seed(len(groups))
    engine: list[torch.Tensor] = []
    processes: list[torch.Tensor] = []
    for valid in groups:
        losses = [torch.rand(n, generator=generator, dtype=torch.float64) for n in valid]
        for rank, own in enumerate(losses):
            local = own.mean() if len(own) else torch.zeros(())
            engine.append(local * loss_scale(valid, rank))
        every = torch.cat(losses)
        processes.append(every.mean() if len(every) else torch.zeros(()))
    got, want = (torch.stack(list(x)).double().mean() for x in (engine, processes))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@given(counts)
def test_weights_of_an_average_add_up_to_one(valid: Sequence[int]) -> None:
    weights = average_weights(valid)
    assert sum(weights) == pytest.approx(1.0)
    if sum(valid):
        assert weights == pytest.approx([n / sum(valid) for n in valid])
        scales = [loss_scale(valid, rank) for rank in range(len(valid))]
        assert scales == pytest.approx([w * len(valid) for w in weights])
    else:
        assert weights == pytest.approx([1 / len(valid)] * len(valid))
        assert [loss_scale(valid, rank) for rank in range(len(valid))] == [0.0] * len(valid)


# -- a rank without targets -------------------------------------------------------------------------


TOKENS = 6


def tiny(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [TOKENS, 11], and the weight they depend on."""
    torch.manual_seed(0)
    weight = torch.randn(5, 5, dtype=dtype, requires_grad=True)
    attention = Attention.apply(torch.randn(TOKENS, 5, dtype=dtype) @ weight)
    hidden: Any = torch.tanh(attention)  # type: ignore[arg-type]
    return F.linear(hidden, torch.randn(11, 5, dtype=dtype, requires_grad=True)), weight


class Attention(torch.autograd.Function):
    """Counts its backward passes: each of them would communicate."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Attention.backwards = 0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Attention.backwards += 1
        return gradient


NOTHING = torch.full((TOKENS,), -100)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": True}])
def test_cross_entropy_over_nothing_adds_nothing(dtype: torch.dtype, options: Any) -> None:
    logits, weight = tiny(dtype)
    if "weight" in options:
        options = {"weight": torch.rand(11, dtype=dtype)}
    loss = F.cross_entropy(logits, NOTHING, **options)
    assert bool(loss.isnan()), "torch's mean over nothing"
    muted = zero_loss(loss)
    assert (muted.item(), muted.dtype) == (0.0, dtype)
    muted.backward()
    assert Attention.backwards == 1, "the graph runs: other ranks wait for it"
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    check_zero_loss(loss.item(), [weight.grad])


@pytest.mark.parametrize("value", ["sum", "mean over max(n, 1)"])
def test_a_finite_loss_over_nothing_adds_nothing(value: str) -> None:
    logits, weight = tiny(torch.float32)
    losses = F.cross_entropy(logits, NOTHING, reduction="sum")
    muted = zero_loss(losses if value == "sum" else losses / 1 + 3 * logits.mean())
    muted.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def masked_mean(logits: torch.Tensor) -> torch.Tensor:
    """0/0 with a gradient of NaN."""
    losses = F.cross_entropy(logits, NOTHING.clamp(min=0), reduction="none")
    counted = (NOTHING != -100).to(logits.dtype)
    return (losses * counted).sum() / counted.sum()


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (masked_mean, "nan"),
        (lambda logits: logits.sum() / 0 + 1, "inf|nan"),
        (lambda logits: logits.mean() + float("inf"), "inf"),
        (lambda logits: logits.mean() - float("inf"), "-inf"),
        (lambda logits: (logits - logits.detach() - 1).sqrt().sum(), "nan"),
    ],
)
def test_a_loss_that_cannot_be_muted_is_refused(make: Any, shown: str) -> None:
    logits, weight = tiny(torch.float32)
    loss = make(logits)
    zero_loss(loss).backward()
    assert weight.grad is not None
    with pytest.raises(NonFiniteError, match=rf"the loss is ({shown}) on a rank.*no valid label"):
        check_zero_loss(loss.item(), [weight.grad])


def chunked(logits: torch.Tensor) -> torch.Tensor:
    """The mean of the means of chunks, each over nothing."""
    chunks = zip(logits.split(2), NOTHING.split(2), strict=True)
    return torch.stack([F.cross_entropy(part, y) for part, y in chunks]).mean()


def test_a_mean_of_means_over_nothing_adds_nothing() -> None:
    logits, weight = tiny(torch.float32)
    loss = chunked(logits)
    zero_loss(loss).backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    check_zero_loss(loss.item(), [weight.grad])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_model_over_nothing_adds_nothing(reentrant: bool) -> None:
    weight = torch.randn(5, 5, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)

    x = torch.randn(TOKENS, 5, requires_grad=True)
    logits: Any = checkpoint(block, x, use_reentrant=reentrant)
    loss = F.cross_entropy(logits, NOTHING.clamp(max=4))
    zero_loss(loss).backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    check_zero_loss(loss.item(), [weight.grad])


@pytest.mark.parametrize("make", [chunked, masked_mean, lambda logits: logits.sum() * 0 + 1])
def test_a_loss_that_is_computed_from_the_model(make: Any) -> None:
    logits, _ = tiny(torch.float32)
    check_connected(make(logits) / 3)


@pytest.mark.parametrize(
    "loss",
    [
        None,
        torch.zeros(()),
        torch.zeros((), requires_grad=True),
        torch.zeros((), requires_grad=True) / 3 + 1,
        torch.ones(5).mean(),
    ],
)
def test_a_loss_that_is_not_is_refused(loss: torch.Tensor | None) -> None:
    with pytest.raises(
        ConfigError, match=r"training_step returned (no loss|a loss of \d\.\d that is not)"
    ):
        check_connected(loss)
