"""Dropout and noise: N ranks train as one with the same random numbers does, in every mode and layout."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.noisy import Result, Run, execute

SLOW = pytest.mark.nightly


@lru_cache(maxsize=16)
def one_rank(run: Run) -> Result:
    """The same data, all of it on one rank, from the same random state."""
    alone = replace(run, settings=None, data_size=1, rows=run.rows * run.data_size, compiled=False)
    return run_ranks(1, execute, alone)[0]


def check(ranks: int, run: Run, settings: dict[str, Any]) -> list[Result]:
    """Losses, weights and the generator; returns what each rank had."""
    want = one_rank(run)
    results = run_ranks(ranks, execute, replace(run, settings=tuple(settings.items())), timeout=240)
    for got in results:
        torch.testing.assert_close(got.losses, want.losses, rtol=1e-10, atol=0)
        assert torch.equal(got.state, want.state)
        for name, weight in want.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-10, atol=1e-12)
    return results


RING = {"ring_size": 2, "ulysses_size": 1}
ULYSSES = {"ring_size": 1, "ulysses_size": 2}
HYBRID = {"ring_size": 2, "ulysses_size": 2}
BLOCKS = {"activation_checkpointing": "blocks"}
KEEP = {"activation_checkpointing": "keep_attention"}
TILED = {"tiled_mlp": 5, "mlp_modules": "NoisyMlp"}

SHARED = {
    **{f"attention.{name}": "colwise" for name in "qkv"},
    **{"mlp.up": "colwise", "attention.o": "rowwise", "mlp.down": "rowwise"},
}
TP = {"tensor_parallel_size": 2, "data_parallel": "fsdp", "tensor_parallel_plan": SHARED}

QUICK: dict[str, tuple[int, dict[str, Any]]] = {
    "ring of 3, balanced, kept": (3, {"ring_size": 3, "layout": "balanced", **KEEP}),
    "hybrid, fsdp, tiled": (4, {**HYBRID, "data_parallel": "fsdp", **TILED}),
    "ring, tp, blocks": (4, {**RING, **TP, **BLOCKS}),
}
LONG: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        f"{mode} of {sizes}, {layout}": (math.prod(sizes), settings)
        for mode, sizes in [
            ("ring", (2, 1)),
            ("ring", (4, 1)),
            ("ulysses", (1, 2)),
            ("hybrid", (2, 2)),
        ]
        for layout in ("contiguous", "zigzag", "balanced")
        for settings in [{"ring_size": sizes[0], "ulysses_size": sizes[1], "layout": layout}]
    },
    "zigzag_llama3": (3, {"mode": "zigzag_llama3"}),
    "ulysses, blocks": (2, {**ULYSSES, **BLOCKS}),
    "ulysses, kept, tiled": (2, {**ULYSSES, **KEEP, **TILED}),
    "ring, fsdp, kept": (2, {**RING, "data_parallel": "fsdp", **KEEP}),
    "ulysses, tp, kept": (4, {**ULYSSES, **TP, **KEEP}),
    "ring, zero1": (2, {**RING, "data_parallel": "zero1"}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(QUICK))
def test_as_one_rank(name: str) -> None:
    check(QUICK[name][0], Run(packed="balanced" in name), QUICK[name][1])


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", list(LONG))
def test_as_one_rank_everywhere(name: str, packed: bool) -> None:
    check(LONG[name][0], Run(packed=packed), LONG[name][1])


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, ULYSSES),
        pytest.param(2, RING, marks=SLOW),
        pytest.param(3, {"ring_size": 3, **KEEP, **TILED}, marks=SLOW),
        pytest.param(4, {**HYBRID, "data_parallel": "fsdp"}, marks=SLOW),
    ],
)
def test_with_fabric(ranks: int, settings: dict[str, Any]) -> None:
    check(ranks, Run(fabric=True), settings)


@pytest.mark.quick("ring")
# PyTorch's compiler asks every tensor for its gradient that one graph hands to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("settings", "in_graphs"),
    [(RING, True), ({**ULYSSES, **KEEP}, False)],
    ids=["ring", "ulysses, kept"],
)
def test_compiled(settings: dict[str, Any], in_graphs: bool) -> None:
    """Graphs draw with the operators of the package.

    They draw seeds in an order of their own, so that one process is compiled as well; the compiler leaves
    blocks that are checkpointed and break graphs to Python, with its order.
    """
    run = Run(compiled=True, steps=2)
    results = run_ranks(2, execute, replace(run, settings=tuple(settings.items())), timeout=400)
    want = run_ranks(1, execute, replace(run, compiled=in_graphs), timeout=400)[0]
    for got in results:
        torch.testing.assert_close(got.losses, want.losses, rtol=1e-10, atol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=SLOW)])
def test_data_ranks_accumulation_and_chance(engine: str) -> None:
    """Two data ranks and two micro-batches are one batch of all; masks agree as often as chance has it."""
    settings = {
        **{"ring_size": 2, "ulysses_size": 1, "data_parallel_size": 2, "data_parallel": engine},
        "token_weighting": "global",
    }
    run = Run(data_size=2, accumulate=2, steps=2)
    results = run_ranks(4, execute, replace(run, settings=tuple(settings.items())), timeout=240)
    masks = [torch.stack(got.masks).double() for got in results]
    assert masks[0].shape[:2] == (4, run.rows)
    p = float(torch.stack(masks).mean())
    assert abs(p - 0.2) < 5 * (0.16 / torch.stack(masks).numel()) ** 0.5
    same, count = 1 - 2 * 0.2 * 0.8, masks[0].numel()
    for a in range(4):
        for b in range(a):
            agree = float((masks[a] == masks[b]).double().mean())
            assert abs(agree - same) < 5 * (same * (1 - same) / count) ** 0.5, (a, b)
    for mask in masks:  # no micro-batch is another's
        assert not any(torch.equal(mask[0], other) for other in mask[1:])
