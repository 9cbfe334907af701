"""Tokens and model FLOPs are the same integers however a run is shared, and those of a dense count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.pool import run_ranks
from tests.helpers.throughput.brute import attention_flops, dense_pairs
from tests.helpers.throughput.runs import LENGTH, Run, ids_of, rows_of, trained

TOKENS, FLOPS = "throughput/tokens", "throughput/model_flops"

WAYS: list[tuple[int, dict[str, Any] | None]] = [
    (1, None),
    (1, {}),
    (2, {"ring_size": 2, "ulysses_size": 1}),
    (4, {"ring_size": 2, "ulysses_size": 2}),
    (4, {"ring_size": 2, "ulysses_size": 1, "data_parallel_size": 2}),
    (2, {"strategy": "ddp"}),
]

LLAMA = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 43
"""Of the small Llama: q and o, k and v, the MLP, of two layers; and the head. No embedding, no norms."""


def counted(run: Run) -> tuple[int, int]:
    """(tokens, FLOPs) by dense masks of every row: two layers of four heads of 8."""
    tokens = flops = 0
    windows = {"gemma2": [(run.window - 1, -1), (-1, -1)], "mistral": [(run.window - 1, -1)] * 2}
    for row in rows_of(run):
        ids = ids_of(row)
        tokens += int((ids >= 0).sum())
        for window in windows.get(run.model, [(-1, -1)] * 2):
            flops += attention_flops(dense_pairs(ids[None], run.model != "bert", window), 4, 8)
    return tokens, flops + 6 * LLAMA * tokens


@pytest.mark.nightly
@pytest.mark.parametrize(
    "run",
    [
        Run(),
        Run(batch="packed"),
        pytest.param(Run(batch="padded"), marks=pytest.mark.nightly),
        pytest.param(Run(model="mistral", window=7), marks=pytest.mark.nightly),
        Run(model="gemma2", window=7, batch="packed"),
        Run(batch="packed", accumulate=2),
    ],
    ids=["plain", "packed", "padded", "window", "layers differ", "accumulated"],
)
def test_every_way_counts_the_same(run: Run) -> None:
    tokens, flops = counted(run)
    assert tokens <= 2 * run.batches * LENGTH
    for world_size, settings in WAYS:
        for got in run_ranks(world_size, trained, replace(run, settings=settings)):
            assert (got[TOKENS], got[FLOPS]) == (tokens, flops), settings


@pytest.mark.nightly
def test_in_both_directions() -> None:
    run = Run(model="bert", batch="padded", options={"active_parameters": LLAMA})
    tokens, flops = counted(run)
    for world_size, settings in ((1, None), (2, {"ring_size": 1, "ulysses_size": 2})):
        shared = settings and {**settings, "labels": "aligned"}
        for got in run_ranks(world_size, trained, replace(run, settings=shared)):
            assert (got[TOKENS], got[FLOPS]) == (tokens, flops)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        {"ring_size": 2, "ulysses_size": 1, "data_parallel_size": 2, "data_parallel": "fsdp"},
        {"ring_size": 2, "ulysses_size": 2, "data_parallel": "zero1"},
        {"ring_size": 2, "ulysses_size": 1, "data_parallel": "fsdp", "tensor_parallel_size": 2},
    ],
    ids=["fsdp", "zero1", "tensor parallel"],
)
def test_parameters_and_heads_that_are_shared_count_once(settings: dict[str, Any]) -> None:
    run = Run(settings=settings)
    for got in run_ranks(4, trained, run):
        assert (got[TOKENS], got[FLOPS]) == counted(run)


@pytest.mark.quick("reentrant-1")
@pytest.mark.parametrize(
    ("checkpoint", "ranks"),
    [("reentrant", 1), ("reentrant", 2), ("not", 1), ("not", 2), ("keep", 2)],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_what_is_recomputed_does_not_count(checkpoint: str, ranks: int) -> None:
    settings = None if ranks == 1 else {"ring_size": 2, "ulysses_size": 1}
    run = Run(settings=settings, checkpoint=checkpoint, batches=4)
    for got in run_ranks(ranks, trained, run):
        assert (got[TOKENS], got[FLOPS]) == counted(run)


@pytest.mark.nightly
def test_frozen_layers_have_no_gradient_of_their_own() -> None:
    """A frozen embedding and first layer are passed by no gradient; a frozen head is."""
    run = Run(freeze=("embed_tokens", "layers.0.", "lm_head"))
    layer, head = (LLAMA - 32 * 43) // 2, 32 * 43
    rows = rows_of(run)
    pairs = sum(dense_pairs(torch.zeros(1, LENGTH), causal=True) for _ in rows)
    tokens = LENGTH * len(rows)
    attention = attention_flops(pairs, 4, 8) * 4 // 3  # of the frozen layer the forward alone
    want = (2 * layer + 6 * layer + 4 * head) * tokens + attention
    for world_size, settings in WAYS[::2]:
        for got in run_ranks(world_size, trained, replace(run, settings=settings)):
            assert got[FLOPS] == want
