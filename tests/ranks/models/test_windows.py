"""Windows, wherever a model says that it has one: parity with one process, or a refusal.

A cell counts only if the comparison would notice a window that is ignored, which is checked.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_cp.errors import ConfigError
from tests.helpers.models.later import needs
from tests.helpers.models.steps import LENGTH, Case, Outcome, one_process, parallel
from tests.helpers.pool import expect_on_every_rank, run_ranks

SIZES = {"ring 2": (1, 2), "ulysses 2": (2, 1), "hybrid 2x2": (2, 2)}

MODERNBERT = pytest.param("modernbert", marks=needs("modernbert"))

WINDOWS = {"smaller than a shard": 5, "larger than a shard": 30}

FLOAT32_INSIDE = {"gemma2"}
"""One process has eager attention only, whose softmax is float32."""


def difference(got: Outcome, want: Outcome) -> float:
    """The largest difference of logits and gradients, the latter as a part of the largest entry."""
    parts = [float((got.logits - want.logits).abs().max())]
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        parts.append(float((got.gradients[name] - gradient).abs().max()) / scale)
    return float(
        torch.tensor(parts, dtype=torch.float64).max()
    )  # NaN if any is; Python's max may drop it


def test_the_difference_to_something_that_is_not_a_number_is_not_small() -> None:
    one, nan = torch.ones(2), torch.full((2,), torch.nan)
    want = Outcome(1.0, {"a": one, "b": one}, one)
    assert difference(want, want) == 0.0
    for got in (
        Outcome(1.0, {"a": nan, "b": one}, one),
        Outcome(1.0, {"a": one, "b": nan}, one),
        Outcome(1.0, {"a": one, "b": one}, nan),
    ):
        assert not difference(got, want) <= 1e-3


def compare(case: Case, ulysses: int, ring: int, *, calls: int = 2) -> None:
    tolerance = 1e-6 if case.model in FLOAT32_INSIDE else 1e-12
    want = one_process(case)
    if case.window:
        assert difference(one_process(replace(case, window=0)), want) > 1e3 * tolerance
    for got in run_ranks(ulysses * ring, parallel, case, ulysses, ring, timeout=30):
        assert got.loss == pytest.approx(want.loss, rel=tolerance)
        assert difference(got, want) <= tolerance
        assert got.calls == calls, "one call a layer, and one more if it is run again"


@pytest.mark.quick(
    "qwen2-smaller than a shard",
    "gemma3-smaller than a shard",
    "gemma2-larger than a shard",
    "phimoe-larger than a shard",
)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("model", ["mistral", "qwen2", "gemma2", "gemma3", MODERNBERT, "phimoe"])
def test_windows_equal_one_process(model: str, window: str) -> None:
    compare(Case(model=model, window=WINDOWS[window]), 1, 2)


@pytest.mark.quick("modernbert-hybrid 2x2")
@pytest.mark.parametrize("size", ["ulysses 2", "hybrid 2x2"])
@pytest.mark.parametrize("model", ["gemma3", MODERNBERT])
def test_two_kinds_of_layers_on_other_meshes(model: str, size: str) -> None:
    compare(Case(model=model, window=5), *SIZES[size])


def test_windows_within_packed_documents() -> None:
    compare(Case(model="gemma3", window=5, batch="packed", use_cache=False), 1, 2)


@pytest.mark.parametrize("checkpoint", ["reentrant", "plain"])
def test_windows_are_known_when_blocks_are_run_again(checkpoint: str) -> None:
    case = Case(model="gemma3", window=5)
    want = one_process(case)
    for got in run_ranks(2, parallel, replace(case, checkpoint=checkpoint), 1, 2, timeout=30):
        assert difference(got, want) <= 1e-12
        assert got.calls == 4


@pytest.mark.quick("mixtral", "gpt_neox", "olmo2")
@pytest.mark.parametrize(
    "model",
    ["qwen3", "phi3", "gpt_neox", "olmo2", "granite", "smollm3", "mixtral", "qwen3_moe", "afmoe"],
)
def test_ordinary_models_equal_one_process(model: str) -> None:
    compare(Case(model=model), 1, 2)


def test_a_chunk_longer_than_the_sequence_hides_nothing() -> None:
    compare(Case(model="llama4"), 1, 2)


@pytest.mark.parametrize("chunk", [5, LENGTH - 1])
def test_chunked_attention_is_refused(chunk: int) -> None:
    case = Case(model="llama4", window=chunk)
    expect_on_every_rank(
        2, parallel, case, 1, 2, error=ConfigError, timeout=20,
        match=rf"attends in chunks \(attention_chunk_size={chunk}\).*sequence has 37 tokens",
    )  # fmt: skip
