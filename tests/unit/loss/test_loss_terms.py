"""What a loss counted, read from its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_cp.errors import ConfigError
from lightning_cp.loss.counts import TargetCounts
from lightning_cp.loss.terms import (
    LossTerms,
    declared_count,
    divisor,
    factors_of,
    loss_terms,
    targets_of,
)
from lightning_cp.utils.autograd_notes import Origin, note_origin

TARGETS = torch.tensor([[0, 1, -100, 2], [3, -100, 4, 4]])
CLASSES = torch.tensor([1.0, 2.0, 0.5, 0.5, 3.0])


def tokens() -> torch.Tensor:
    """[2, 4, 5]: logits of a rank's own tokens."""
    x = nn.Parameter(torch.randn(2, 4, 5)) * 2
    note_origin(x, Origin.TOKENS)
    return x + 1


def sequence() -> torch.Tensor:
    """[2, 4]: of the whole sequence, made of tokens."""
    x = tokens().sum(-1)
    note_origin(x, Origin.SEQUENCE)
    return x


def mean(logits: torch.Tensor, **options: object) -> torch.Tensor:
    targets = TARGETS.flatten() if "ignore_index" not in options else TARGETS.flatten().clamp(min=0)
    return F.cross_entropy(logits.flatten(0, 1), targets, **options)  # type: ignore[arg-type]


def of_rows() -> torch.Tensor:
    return F.cross_entropy(sequence(), torch.tensor([1, 2]))


def a_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def a_matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 3))


def baseline() -> torch.Tensor:
    """A rank's own mean over its tokens, which no attention has seen."""
    return (a_parameter()[0] - TARGETS.float()).square().mean()


def embeddings() -> torch.Tensor:
    return F.embedding(TARGETS.clamp(min=0), nn.Parameter(torch.ones(5, 2)))


def of_several(*outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As DDP returns what a model does, and modules with backward hooks."""
    return BackwardHookFunction.apply(*outputs)  # type: ignore[no-any-return]


KNOWN: dict[str, tuple[Callable[[], torch.Tensor], list[float]]] = {
    "cross-entropy": (lambda: mean(tokens()), [6]),
    "two dimensions": (lambda: F.cross_entropy(tokens().transpose(1, 2), TARGETS), [6]),
    "another ignored": (lambda: mean(tokens(), ignore_index=4, weight=None), [6]),
    "by class": (lambda: mean(tokens(), weight=CLASSES), [1 + 2 + 0.5 + 0.5 + 3 + 3]),
    "a sum with factors": (lambda: (mean(tokens()) - 0.1 * mean(tokens()) / 3).squeeze(), [6, 6]),
    "the mean of heads": (lambda: torch.stack([mean(tokens()), mean(tokens())]).mean(), [6, 6]),
    "of whole rows": (lambda: F.logsigmoid(sequence().sum(1)).mean(), []),
    "classes of rows": (of_rows, []),
    "both": (lambda: mean(tokens()) + of_rows().exp(), [6]),
    "times a whole one": (lambda: mean(tokens()) * of_rows(), [6]),
    "a regulariser": (lambda: mean(tokens()) + 0.1 * a_parameter().square().sum().sqrt(), [6]),
    "beside its beginning": (lambda: (a_parameter() - torch.zeros(3)).norm() + mean(tokens()), [6]),
    "taken from a number": (lambda: 1 - mean(tokens()) + (2 - a_parameter()).norm(), [6]),
    "a head of whole rows": (lambda: (sequence() @ a_matrix() + a_parameter()).exp().mean(), []),
    "beside logits": (lambda: of_several(tokens(), mean(tokens()))[1] / 2, [6]),
    "learned weight": (lambda: mean(tokens()) * (-a_parameter()[0]).exp(), [6]),
}  # fmt: skip

UNKNOWN: dict[str, Callable[[], torch.Tensor]] = {
    "logits beside it": lambda: of_several(tokens(), mean(tokens()))[0].sum(),
    "a sum": lambda: mean(tokens(), reduction="sum"),
    "by hand": lambda: mean(tokens(), reduction="none").sum() / 6,
    "over all tokens": lambda: mean(tokens()) + tokens().logsumexp(-1).square().mean(),
    "a function of a mean": lambda: mean(tokens()).exp(),
    "a product of means": lambda: mean(tokens()) * mean(tokens()),
    "divided by a mean": lambda: 1 / mean(tokens()),
    "rows of tokens": lambda: F.logsigmoid(tokens().sum((1, 2))).mean(),
    "rows and tokens": lambda: (sequence().sum(1) + tokens().sum((1, 2))).exp().mean(),
    "taken from them": lambda: (
        mean(tokens()) + torch.rsub(nn.Parameter(torch.ones(2, 4)), TARGETS.float()).exp().sum()
    ),
    "of detached tokens": lambda: (tokens().detach() * nn.Parameter(torch.ones(5))).mean(),
    "a baseline": lambda: (a_parameter()[0] - TARGETS.float()).square().mean(),
    "a baseline of their mean": lambda: (a_parameter().sum() - TARGETS.float().mean()).square(),
    "times their mean": lambda: a_parameter().sum() * TARGETS.float().mean(),
    "a product with them": lambda: (nn.Parameter(torch.ones(3, 2)) @ TARGETS.float()).sum(),
    "joined with them": lambda: (
        torch.cat([a_parameter(), TARGETS.flatten().float()]).square().mean()
    ),
    "a mean for each token": lambda: mean(tokens()).expand(TARGETS.shape[0]).sum(),
    "as many as tokens": lambda: a_parameter()[: TARGETS.shape[0]].square().sum(),
    "for each token": lambda: a_parameter().expand(TARGETS.shape[0], 3).sum(),
    "rows and a baseline": lambda: (sequence().sum() - baseline()).exp(),
    "rows and embeddings": lambda: F.logsigmoid(
        sequence().sum(1) - embeddings().square().mean()
    ).mean(),
    "in a reentrant checkpoint": lambda: checkpoint(
        lambda x: x.sum(), sequence() + 0, use_reentrant=True
    ).exp(),
    "of an input": lambda: torch.ones(3, requires_grad=True).sum(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_counts(name: str) -> None:
    make, want = KNOWN[name]
    means = loss_terms(make())
    assert not means.other_terms
    assert sorted(map(float, means.counts)) == want
    assert not means.own_factor


HALF = torch.tensor(0.5, dtype=torch.float64)
OWN_FACTORS: dict[str, Callable[[], torch.Tensor]] = {
    "how many it counts": lambda: mean(tokens()) * (TARGETS != -100).sum() / 100,
    "divided by them": lambda: mean(tokens()) / (TARGETS != -100).sum(),
    "a tensor first": lambda: (HALF.float() * mean(tokens())).sum(),
    "of the loss's dtype": lambda: mean(tokens()).double() * HALF,
    "a weight of each head": lambda: (mean(tokens())[None] * torch.ones(2)).mean(),
    "in place": lambda: mean(tokens()).mul_(HALF),
    "of half precision": lambda: mean(tokens()) * HALF.half(),
    "beside another term": lambda: 0.5 * mean(tokens()) + HALF * mean(tokens()),
}


@pytest.mark.parametrize("name", OWN_FACTORS)
def test_a_tensor_as_a_factor_may_be_a_rank_s_own(name: str) -> None:
    means = loss_terms(OWN_FACTORS[name]())
    assert not means.other_terms
    assert set(map(int, means.counts)) == {6}
    assert means.own_factor


def test_numbers_of_python_are_told() -> None:
    one, other = mean(tokens()), mean(tokens())
    loss = torch.stack([torch.sub(one * 3, other / 7.5, alpha=2), 0.5 * other]).sum() / True
    means = loss_terms(loss)
    assert sorted(means.numbers) == [0.5, 2, 3, 7.5]


@pytest.mark.parametrize(
    ("loss", "numbers"),
    [
        (lambda: mean(tokens(), label_smoothing=0.1), [0.1 / 5, 0.9]),
        (lambda: torch.trapezoid(tokens().mean((0, 2))), [1.0, 0.5]),
    ],
    ids=["cross-entropy kept before", "trapezoid"],
)
def test_numbers_that_operators_save_unwrapped(loss: Any, numbers: list[float]) -> None:
    """A composite of C++ saves a scalar as a float; such a loss is asked about."""
    found = loss_terms(loss())
    assert found.other_terms
    values = factors_of(loss(), 100).values
    assert [x for x in values if isinstance(x, float)] == pytest.approx(numbers)


def test_numbers_within_a_term_of_parameters_are_told() -> None:
    term = 3 * (7 * a_parameter() / 5).square().sum()
    assert sorted(loss_terms(mean(tokens()) + term).numbers) == [3, 5, 7]


@pytest.mark.parametrize(
    ("loss", "want"),
    [
        (lambda: of_rows() * 3, [3]),
        (lambda: of_rows() / 3, [3]),
        (lambda: mean(tokens()) / 7 + of_rows() * 3, [3, 7]),
    ],
)
def test_numbers_beside_whole_rows_are_told(loss: Any, want: list[float]) -> None:
    assert sorted(loss_terms(loss()).numbers) == want


def test_numbers_are_told_under_a_mode_that_counts() -> None:
    """Which is handed numbers that autograd has wrapped as Python has them."""
    with FlopCounterMode(display=False):
        means = loss_terms(mean(tokens()) * 3)
    assert means.numbers == [3]


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_counts(name: str) -> None:
    assert loss_terms(UNKNOWN[name]()).other_terms


def test_a_mean_beside_another_term_is_counted() -> None:
    means = loss_terms(mean(tokens()) + tokens()[:, 0].square().mean())
    assert list(map(int, means.counts)) == [6]
    assert means.other_terms


def test_another_tensor_beside_parameters_is_told() -> None:
    """By what is computed of both, as a gradient has nothing of it but that."""
    own, zero = torch.full((3,), 0.25), torch.zeros(3)
    for loss in (
        lambda x: mean(tokens()) + 0.5 * (a_parameter() - x).square().sum(),
        lambda x: mean(tokens()) * (x + a_parameter()).norm(),
        lambda x: (float(x[0]) - a_parameter()).square().sum() + mean(tokens()),
        lambda x: (-(a_parameter() + 2 * a_parameter() - x).abs()).mean() + mean(tokens()),
    ):
        told, other = (loss_terms(loss(x)).joined for x in (own, zero))
        assert len(told) == len(other) > 0
        assert any(not torch.equal(a, b) for a, b in zip(told, other, strict=True))
    regulariser = mean(tokens()) + 0.1 * a_parameter().square().sum().sqrt() + tokens().sum()
    assert loss_terms(regulariser).joined == ()


@pytest.mark.parametrize(
    "term",
    [
        lambda w, x: (w - x).square().sum() / w.numel(),
        lambda w, x: (2 * (w - x)).square().sum(),
        lambda w, x: ((w - x) / 2).square().sum(),
        lambda w, x: (w - x).norm(),
    ],
)
def test_a_small_part_of_another_tensor_is_told(term: Any) -> None:
    """One row of many: the norm of all hardly moves."""
    draws = torch.Generator().manual_seed(0)
    own, other = torch.randn(40000, 8, generator=draws), []
    parameter = nn.Parameter(torch.zeros(40000, 8))
    for x in (own, own.index_fill(0, torch.tensor([7]), 0.0)):
        counts = TargetCounts()
        loss = mean(tokens()) + 0.1 * term(parameter, x)
        counts.note_shared(loss, 3, loss_terms(loss))
        other.append(counts.numbers[-1][0])
    a, b = ([float(number) for number in each] for each in other)
    assert len(a) == len(b) > 0
    assert any(abs(x - y) > 1e-4 * abs(y) for x, y in zip(a, b, strict=True))  # 1e-5 is refused


def test_factors_of_zero() -> None:
    loss = mean(tokens()) + 0.0 * tokens().sum() + (0 * tokens() + HALF * tokens()).exp().sum()
    assert sum(factors_of(loss, 100).zeros) == 2
    found = factors_of(loss * torch.zeros(()), 100)
    assert sum(found.zeros) == 3
    assert found.are_zero(found.zeros)
    assert not factors_of(loss * torch.ones(()), 100).are_zero(found.zeros)
    assert not factors_of(loss, 100).are_zero(found.zeros)
    assert sum(factors_of(loss, 1).zeros) == 1, "what has features is not looked into"


def test_what_is_noted_of_other_functions() -> None:
    loss = tokens().sum()
    note_origin(loss, 5)
    assert loss_terms(0.5 * loss) == LossTerms([5], False, [0.5])
    soft = torch.full((6, 5), 0.2)
    assert targets_of(soft, None, -100, 5) == 6


def test_weights_of_classes_are_counted_in_more_than_bfloat16() -> None:
    classes = torch.tensor([1.0, 0.3], dtype=torch.bfloat16)
    count = targets_of(torch.tensor([0, 1]).repeat(1500), classes)
    assert float(count) == pytest.approx(1500 + 1500 * float(classes[1]), rel=1e-6)


def test_what_is_declared() -> None:
    assert declared_count(TARGETS != -100) == 6
    assert declared_count(torch.tensor([0.25, 0.5])) == 0.75
    assert float(declared_count(torch.full((3000,), 30.0, dtype=torch.float16))) == 90_000
    assert [int(divisor(declared_count(n))) for n in (0, 3)] == [1, 3]
    for wrong in (-1, float("nan")):
        with pytest.raises(ConfigError, match="declares no number of targets"):
            declared_count(wrong)
