"""Cross-entropy in chunks against PyTorch's of all logits, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.step_memory import PeakBytes
from lightning_cp import linear_cross_entropy
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.memory import chunked_loss as cross_entropy
from tests.helpers.memory.sizes import Largest

ROWS, LENGTH, FEATURES, VOCAB = 2, 25, 16, 37


@dataclass(frozen=True)
class Case:
    """One call."""

    dtype: torch.dtype = torch.float64
    bias: bool = False
    scale: float = 1.0
    softcap: float = 0.0
    reduction: str = "none"
    chunk: int = 7
    vocab: int = VOCAB
    rows: int = ROWS
    autocast: bool = False
    """In bfloat16, of float32 inputs."""

    def inputs(self) -> list[torch.Tensor | None]:
        """Hidden states, weight and bias."""
        generator = torch.Generator().manual_seed(1)
        shapes = [(self.rows, LENGTH, FEATURES), (self.vocab, FEATURES), (self.vocab,)]
        made = [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]
        return [x.requires_grad_() for x in made[: 2 + self.bias]] + [None] * (not self.bias)

    def targets(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        made = torch.randint(0, self.vocab, (self.rows, LENGTH), generator=generator)
        made[torch.rand(self.rows, LENGTH, generator=generator) < 0.3] = -100
        return made


def chunked(case: Case, hidden: Any, weight: Any, bias: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        return linear_cross_entropy(
            *(hidden, weight, bias, case.targets()),
            reduction=case.reduction,
            chunk_tokens=case.chunk,
            scale=case.scale,
            softcap=case.softcap,
        )


def whole(case: Case, hidden: Any, weight: Any, bias: Any) -> torch.Tensor:
    """What a model does with all logits, and losses of float32 at least."""
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        z = F.linear(hidden, weight, bias)
        z = z * case.scale if case.scale != 1 else z
        z = case.softcap * torch.tanh(z / case.softcap) if case.softcap else z
        z = z if z.dtype == torch.float64 else z.float()
        loss = F.cross_entropy(z.flatten(0, 1), case.targets().flatten(), reduction=case.reduction)
    return loss if loss.dim() == 0 else loss.view(case.rows, LENGTH)


def results(case: Case, function: Any, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Losses and gradients, in float64; computed in ``dtype``."""
    given = [
        x if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in case.inputs()
    ]
    loss = function(case, *given)
    upstream = torch.randn(loss.shape, generator=torch.Generator().manual_seed(3))
    loss.backward(upstream.to(loss.dtype))
    gradients = [x.grad.double() for x in given if x is not None and x.grad is not None]
    return [loss.detach().double(), *gradients]


def errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    """Of each result, as a part of its largest number."""
    assert len(got) == len(want)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)]


CASES = [
    Case(bias=bias, scale=scale, softcap=softcap, reduction=reduction, chunk=chunk)
    for bias in (False, True)
    for scale, softcap in ((1.0, 0.0), (0.5, 0.0), (1.0, 2.0))
    for reduction in ("none", "sum", "mean")
    for chunk in (1, 7, 50, 1000)
]


@pytest.mark.nightly
@pytest.mark.parametrize("own", [False, True], ids=["chosen", "own"])
def test_float64_is_that_of_all_logits(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if own:
        monkeypatch.setattr(cross_entropy, "_pytorch_is_exact", lambda *_: False)
    for case in CASES:
        found = errors(results(case, chunked), results(case, whole))
        assert max(found) < 1e-14, case
    without = errors(results(replace(CASES[0], softcap=2.0), chunked), results(CASES[0], whole))
    assert max(without) > 0.1, "the comparison sees a cap"


def test_pytorchs_is_used_where_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Case] = []
    own = cross_entropy._by_pytorch
    monkeypatch.setattr(cross_entropy, "_by_pytorch", lambda *x: calls.append(case) or own(*x))
    there = hasattr(torch.nn, "LinearCrossEntropyOptions")
    exact = [Case(), Case(torch.float32, bias=True)]
    others = [Case(softcap=2.0), Case(torch.bfloat16), Case(torch.float32, autocast=True)]
    for case in (*exact, *others):
        results(case, chunked)
    assert calls == (exact if there else [])


HALF = Case(torch.bfloat16, vocab=512, rows=8, chunk=16, bias=True, reduction="mean")


@pytest.mark.parametrize(
    "case",
    [
        HALF,
        replace(HALF, softcap=3.0),
        replace(HALF, dtype=torch.float32, autocast=True),
        replace(HALF, dtype=torch.float32, autocast=True, scale=0.25),
    ],
    ids=str,
)
def test_bfloat16_is_as_exact_as_with_all_logits(case: Case) -> None:
    """The sum of many chunks' gradients is not rounded after each."""
    want = results(replace(case, autocast=False), whole, torch.float64)
    got, theirs = results(case, chunked), results(case, whole)
    rms = [
        [float((a - b).pow(2).mean().sqrt()) for a, b in zip(each, want, strict=True)]
        for each in (got, theirs)
    ]
    for ours, plain in zip(*rms, strict=True):
        assert ours <= 2 * plain + 1e-7, (rms, case)


def test_losses_of_bfloat16_are_float32() -> None:
    made = chunked(replace(HALF, reduction="none"), *HALF.inputs())
    assert made.dtype == torch.float32
    assert chunked(HALF, *HALF.inputs()).dtype == torch.float32


@pytest.mark.parametrize("own", [False, True], ids=["chosen", "own"])
def test_no_target_gives_nan_and_no_gradient(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if own:
        monkeypatch.setattr(cross_entropy, "_pytorch_is_exact", lambda *_: False)
    hidden, weight, bias = Case(bias=True).inputs()
    none = torch.full((ROWS, LENGTH), -100)
    assert hidden is not None
    assert weight is not None
    loss = linear_cross_entropy(hidden, weight, bias, none, reduction="mean", chunk_tokens=7)
    assert loss.isnan()
    loss.backward()  # infinite times nothing, as for F.cross_entropy, is nothing
    for x in (hidden, weight, bias):
        assert x is not None
        assert torch.equal(x.grad, torch.zeros_like(x))  # type: ignore[arg-type]
    assert linear_cross_entropy(hidden, weight, bias, none, reduction="sum") == 0.0


def test_no_token_at_all() -> None:
    _, weight, bias = Case(bias=True).inputs()
    hidden = torch.zeros(2, 0, FEATURES, dtype=torch.float64, requires_grad=True)
    targets = torch.zeros(2, 0, dtype=torch.long)
    assert weight is not None
    loss = linear_cross_entropy(hidden, weight, bias, targets, reduction="sum")
    loss.backward()
    assert loss == 0.0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_another_ignored_target_and_a_weight_that_is_not_trained() -> None:
    hidden, weight, _ = Case().inputs()
    assert hidden is not None
    assert weight is not None
    weight.requires_grad_(False)
    targets = Case().targets().clamp(min=0)
    loss = linear_cross_entropy(hidden, weight, None, targets, ignore_index=0, reduction="sum")
    want = F.cross_entropy(
        F.linear(hidden, weight).flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
    )
    torch.testing.assert_close(loss, want, rtol=1e-14, atol=0)
    loss.backward()
    assert weight.grad is None


LONG = Case(torch.float32, rows=40, chunk=8, vocab=500, reduction="sum")


@pytest.mark.parametrize(
    "case",
    [LONG, replace(LONG, softcap=3.0), replace(LONG, dtype=torch.bfloat16, bias=True)],
    ids=str,
)
def test_no_tensor_is_larger_than_a_chunk_or_the_weight(case: Case) -> None:
    tokens = case.rows * LENGTH
    with Largest() as all_of_them:
        results(case, whole)
    assert all_of_them.numel == tokens * case.vocab
    with Largest() as found:
        results(case, chunked)
    allowed = max(case.chunk * case.vocab, case.vocab * FEATURES, tokens * FEATURES)
    assert found.numel == allowed
    one = replace(case, chunk=tokens)
    with Largest() as found:
        results(one, chunked)
    assert found.numel == tokens * case.vocab, "the count can tell"


@pytest.mark.quick("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_does_not_grow_with_the_vocabulary_times_the_length(dtype: torch.dtype) -> None:
    """Twice the tokens cost their own hidden states and gradients, and a few numbers each."""
    peaks: list[int] = []
    for rows in (40, 80):
        case = replace(LONG, rows=rows, dtype=dtype)
        given = case.inputs()
        with PeakBytes() as found:
            chunked(case, *given).backward()
        peaks.append(found.peak)
    a_token = (peaks[1] - peaks[0]) / (40 * LENGTH)
    assert a_token < FEATURES * dtype.itemsize + 64
    assert case.vocab * dtype.itemsize > 8 * a_token


@pytest.mark.parametrize("chunk", [0, -1, 2.0, True, None, "8"])
def test_chunks_that_are_none(chunk: Any) -> None:
    hidden, weight, _ = Case().inputs()
    with pytest.raises(ConfigError, match=r"chunk_tokens must be a number of tokens, .* got"):
        linear_cross_entropy(hidden, weight, None, Case().targets(), chunk_tokens=chunk)  # type: ignore[arg-type]


def test_other_bad_input() -> None:
    hidden, weight, bias = Case(bias=True).inputs()
    targets = Case().targets()
    assert hidden is not None
    assert weight is not None
    assert bias is not None
    with pytest.raises(ConfigError, match="reduction must be one of none, sum, mean, got 'max'"):
        linear_cross_entropy(hidden, weight, None, targets, reduction="max")
    with pytest.raises(ShapeError, match=r"needs hidden \[..., C\], weight"):
        linear_cross_entropy(hidden, weight.t(), None, targets)
    with pytest.raises(ShapeError, match=r"int64 targets"):
        linear_cross_entropy(hidden, weight, None, targets.int())
    with pytest.raises(ShapeError, match="one number per row of the weight, 37"):
        linear_cross_entropy(hidden, weight, bias[1:], targets)
    with pytest.raises(ShapeError, match="outside of autocast they must be the same"):
        linear_cross_entropy(hidden.float(), weight, None, targets)
    for strange in (VOCAB, -1):
        with pytest.raises(IndexError, match="out of bounds of the vocabulary of 37"):
            linear_cross_entropy(hidden, weight, None, torch.full_like(targets, strange))
