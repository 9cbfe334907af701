"""Divisors of terms, where every rank counts as many targets."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.loss.counts import TargetCounts
from lightning_cp.loss.derivatives import token_sums
from lightning_cp.loss.divisors import divisors_of
from lightning_cp.loss.terms import loss_terms
from lightning_cp.loss.weighting import count_alike
from lightning_cp.utils.autograd_notes import Origin, note_origin, note_sequence

ROWS, LENGTH = 2, 200
TARGETS = 300

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of values of tokens [2, 200], values of rows [2] and a parameter [4]."""


def doubt(of: Loss, *, alike: bool = True) -> str | None:
    tokens, rows = nn.Parameter(torch.rand(ROWS, LENGTH)) * 1, nn.Parameter(torch.rand(ROWS)) * 1
    note_origin(tokens, Origin.TOKENS)
    note_origin(rows, Origin.SEQUENCE)
    loss = of(tokens, rows, nn.Parameter(torch.rand(4)))
    sums = token_sums(loss, ROWS, LENGTH)
    found = divisors_of(loss, loss_terms(loss), sums, ROWS, LENGTH)
    found.alike = torch.tensor(alike)
    counts = TargetCounts()
    counts.note_shared(loss, TARGETS, None, divisors=found)
    return counts.doubt(None) if counts.has_doubts() else None


def at(x: torch.Tensor, number: int) -> torch.Tensor:
    """Select a few tokens."""
    return torch.arange(x.numel()).view(x.shape) < number


def features(z: torch.Tensor) -> torch.Tensor:
    """Five numbers of each row, as ``sequence_sum`` returns them."""
    found = z[:, None] * torch.ones(5)
    note_origin(found, Origin.SEQUENCE)
    return found


def whole(numbers: list[int]) -> torch.Tensor:
    """Numbers of whole sequences, as ``sequence_sum`` of a mask returns them."""
    return note_sequence(torch.tensor(numbers))


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A function with 2**30 paths to ``x``."""
    for _ in range(30):
        x = 0.9 * x + x.square() * 0.7
    return x


RIGHT: dict[str, Loss] = {
    "whole in many ways": lambda x, z, p: x.sum() / 300 + doubled(z.sum()),
    "numbers of whole rows": lambda x, z, p: x.sum() / 300 + (z / whole([200, 200])).mean(),
    "maxima of features": lambda x, z, p: (x[:, :, None] * p)[at(x, 2)].amax(-1).sum() / 300,
    "norms of features": lambda x, z, p: (x[:, :, None] * p)[at(x, 1)].norm(dim=-1).sum() / 300,
    "sums of features": lambda x, z, p: (x[:, :, None] * p)[at(x, 1)].exp().sum(-1).sum() / 300,
    "flat maxima": lambda x, z, p: (
        (x[:, :, None] * p).flatten(0, 1)[at(x, 2).flatten()].logsumexp(-1).sum() / 300
    ),
    "a number over rows": lambda x, z, p: x.sum() / 300 + (500 / z).mean(),
    "no token": lambda x, z, p: (
        x.sum() / 300 + (x[:, :0, None] * torch.ones(5)).sum(-1).sum() / 300
    ),
    "number": lambda x, z, p: x.sum() / 300,
    "tensor": lambda x, z, p: x.sum() / torch.tensor(300),
    "each": lambda x, z, p: (x * torch.ones(2, 200) / 300).sum(),
    "two divisors": lambda x, z, p: x.sum() / 8 / torch.tensor([300.0]),
    "inverse": lambda x, z, p: x.sum() * (1 / 300) * 0.5,
    "epsilon": lambda x, z, p: -x.sum() / (torch.tensor(300) + 1e-6),
    "bfloat16": lambda x, z, p: x.sum().bfloat16() / torch.tensor(299).bfloat16(),
    "features": lambda x, z, p: (x[..., None] * torch.ones(5)).sum() / (5 * 300),
    "features of some": lambda x, z, p: (x.flatten()[:300, None] * torch.ones(5)).sum() / (5 * 300),
    "mean of features": lambda x, z, p: (x.flatten()[:300, None] * torch.ones(5)).mean(),
    "mean of target first": lambda x, z, p: F.mse_loss(torch.ones(300), x.flatten()[:300]),
    "mean of some": lambda x, z, p: x.flatten()[:300].mean(),
    "chunks": lambda x, z, p: (x[:, :50].sum() + x[:, 50:].sum()) / 300,
    "function": lambda x, z, p: x.exp().sum().mul(p.exp().mean()) / 300 + p.square().sum() / 4,
    "rows": lambda x, z, p: x.sum() / 300 + 0.1 * z.exp().mean() / 7,
    "coefficient": lambda x, z, p: x.sum() / 300 + (1 / 50) * z.mean(),
    "rows times tokens": lambda x, z, p: (z[:, None] * x).sum() / 300,
    "rows in tokens": lambda x, z, p: (z[:, None] * torch.ones(2, 200)).sum() / 300,
}

WRONG: dict[str, Loss] = {
    "none": lambda x, z, p: x.sum(),
    "rows": lambda x, z, p: x.sum(1).mean(),
    "tokens": lambda x, z, p: x.mean(),
    "twice": lambda x, z, p: x.sum() / 600,
    "one of two": lambda x, z, p: x.sum() / 300 + x.square().mean(),
    "one of two chunks": lambda x, z, p: x[:, :50].sum() / 300 + x[:, 50:].sum() / 7,
    "several": lambda x, z, p: x.sum(1) @ (1 / torch.tensor([300.0, 200.0])),
    "function of a sum by features": lambda x, z, p: (
        (x[..., None] * torch.ones(5)).sum((0, 1)).square().sum()
    ),
    "a whole sum": lambda x, z, p: x.sum() / 300 + z.sum() / 300,
    "whole by the tokens": lambda x, z, p: x.sum() / 300 + z.exp().sum() / 400,
    "whole by the length": lambda x, z, p: x.sum() / 300 + (z / 200).mean(),
    "whole by rows of the length": lambda x, z, p: (
        x.sum() / 300 + (z / torch.tensor([200, 200])).sum()
    ),
    "whole times an inverse": lambda x, z, p: x.sum() / 300 + z.sum() * (1 / 400),
    "rows in tokens": lambda x, z, p: x.sum() / 300 + (z[:, None] * torch.ones(2, 200)).mean() / 7,
    "too many paths": lambda x, z, p: doubled(x.sum() / 300),
    "whole in many ways": lambda x, z, p: x.sum() / 300 + doubled(z.sum() / 400),
    "count twice": lambda x, z, p: x.sum() / 300 / torch.tensor(300),
    "mean by the count": lambda x, z, p: x.flatten()[:300].mean() / 300,
    "sum times a length": lambda x, z, p: x.sum() / 300 * 200,
    "whole by numbers of tokens": lambda x, z, p: x.sum() / 300 + features(z).sum() / (400 * 5),
    "whole times counts of rows": lambda x, z, p: x.sum() / 300 + (z * torch.full((2,), 200)).sum(),
    "maximum": lambda x, z, p: x.max() / 300,
    "maxima of rows": lambda x, z, p: x.amax(1).sum() / 300,
    "maxima of a part": lambda x, z, p: x[:, [3, 5, 7]].amax(1).sum() / 300,
    "parameters": lambda x, z, p: x.sum() / 300 + p.square().sum() / 300,
    "rows within tokens": lambda x, z, p: ((z / 200)[:, None] * torch.ones(2, 200)).sum() / 300,
}


@pytest.mark.parametrize("of", RIGHT.values(), ids=RIGHT)
def test_a_count_among_the_divisors_is_right(of: Loss) -> None:
    assert doubt(of) is None


@pytest.mark.parametrize("of", WRONG.values(), ids=WRONG)
def test_another_divisor_is_in_doubt(of: Loss) -> None:
    assert doubt(of) is not None


def test_other_counts_are_compared_and_not_in_doubt() -> None:
    assert doubt(WRONG["rows"], alike=False) is None
    assert doubt(WRONG["a whole sum"], alike=False) is None
    assert doubt(WRONG["whole by the tokens"], alike=False) is not None
    assert doubt(lambda x, z, p: x.mean() / 300, alike=False) is not None
    assert doubt(lambda x, z, p: x.sum() / 600, alike=False) is None


def test_a_loss_that_is_written_like_a_right_one_may_meet_a_count_by_chance() -> None:
    counts = TargetCounts()
    seven, four_hundred = torch.tensor(7.0), torch.tensor(400.0)
    assert not _asks_about_rows(counts, lambda z: z.exp().sum() / seven)
    assert not _asks_about_rows(counts, lambda z: z.exp().sum() / four_hundred)
    assert _asks_about_rows(counts, lambda z: z.exp().sum() / 400)
    assert _asks_about_rows(counts, lambda z: (z / four_hundred).exp().sum())
    assert _asks_about_rows(TargetCounts(), lambda z: z.exp().sum() / four_hundred)


def _asks_about_rows(counts: TargetCounts, of: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    rows = nn.Parameter(torch.rand(ROWS)) * 1
    note_origin(rows, Origin.SEQUENCE)
    loss = of(rows)
    divisors = divisors_of(loss, loss_terms(loss), None, ROWS, LENGTH)
    divisors.alike = True
    counts.note_shared(loss, 1, None, divisors=divisors)
    return counts.take().has_doubts()


@pytest.mark.parametrize(
    ("counts", "want"), [([4, 4], True), ([4, 0, 4, 0], True), ([4, 3], False), ([0, 0], True)]
)
def test_ranks_without_targets_do_not_differ(counts: list[int], want: bool) -> None:
    for given in (torch.tensor(counts, dtype=torch.float64), counts):
        assert bool(count_alike(given)) == want


def test_a_long_recursion_is_read_in_one_pass() -> None:
    """In 20 s on a slow machine if each product were read down to its end."""
    values = torch.rand(1500, dtype=torch.float64, requires_grad=True) * 1
    note_origin(values, Origin.SEQUENCE)
    total = torch.zeros((), dtype=torch.float64)
    for value in values.unbind():
        total = value + 0.99 * total
    terms, calls = loss_terms(total), 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    with mock.patch("lightning_cp.loss.divisors.is_shared", side_effect=count):
        divisors_of(total, terms, None, ROWS, LENGTH)
    assert calls == 0
