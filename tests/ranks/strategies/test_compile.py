"""Models compiled by torch.compile, in a Trainer and with Fabric: they train as one process does without."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch._dynamo import trace_rules

from tests.helpers.memory.runs import Result, Run, execute
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import RING, ULYSSES, Settings, Small, trainer_of, weights
from tests.helpers.strategies.small import loader as small_loader

pytestmark = pytest.mark.filterwarnings(
    # PyTorch's compiler asks every tensor for its gradient that one graph hands to the next.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    # And older ones make an object of an autograd function's class.
    "ignore:.*should not be instantiated:DeprecationWarning",
)


@lru_cache
def alone(run: Run) -> Result:
    """One process, nothing compiled."""
    return run_ranks(1, execute, run)[0]


def compiled(rank: int, world_size: int, run: Run) -> tuple[Result, int]:
    """The run, and the graphs that were made in it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        result = execute(rank, world_size, run)
        return result, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch._dynamo.reset()


def check(how: str, fabric: bool, **settings: Any) -> None:
    """Losses, float32 inside as transformers computes them, and weights after four steps."""
    want = alone(Run(fabric=fabric))
    run = Run(tuple(settings.items()), fabric=fabric, compiled=how)
    for got, graphs in run_ranks(2, compiled, run, timeout=240.0):
        assert graphs > 2
        assert got.losses == pytest.approx(want.losses, rel=1e-6)
        assert got.val_loss == pytest.approx(want.val_loss, rel=1e-6)
        for name, weight in want.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-6, atol=1e-8)


@pytest.mark.quick("trainer-all")
@pytest.mark.parametrize("how", ["all", "model", "blocks"])
@pytest.mark.parametrize("fabric", [False, True], ids=["trainer", "fabric"])
def test_numbers_are_those_of_one_process(how: str, fabric: bool) -> None:
    check(how, fabric)


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        pytest.param("fsdp", "all", marks=pytest.mark.nightly),
        pytest.param("fsdp", "blocks", marks=pytest.mark.nightly),
        pytest.param("zero1", "all", marks=pytest.mark.nightly),
        pytest.param("zero1", "blocks", marks=pytest.mark.nightly),
    ],
)
def test_engines(engine: str, how: str) -> None:
    check(how, False, data_parallel=engine)


LENGTH = {
    "chunked loss": {"chunked_loss": 5},
    "tiled mlp": {"tiled_mlp": 7},
    "blocks": {"activation_checkpointing": "blocks"},
    "keep attention": {"activation_checkpointing": "keep_attention"},
    "all": {"chunked_loss": 5, "tiled_mlp": 7, "activation_checkpointing": "keep_attention"},
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "what", [x if x == "all" else pytest.param(x, marks=pytest.mark.nightly) for x in LENGTH]
)
@pytest.mark.parametrize("how", [pytest.param("all", marks=pytest.mark.nightly), "blocks"])
def test_with_what_makes_sequences_longer(what: str, how: str) -> None:
    check(how, False, **LENGTH[what])


@pytest.mark.nightly
def test_with_the_check_of_the_first_batch() -> None:
    """Which runs the model as it is: it need not be compiled for the lengths of a prefix."""
    check("all", False, parity_check="first_batch")


def plain_blocks(rank: int, world_size: int, settings: Settings | None) -> tuple[torch.Tensor, int]:
    """Weights of blocks that call PyTorch's attention themselves, and compiled graphs.

    The compiler has forgotten what functions are called, as when a process group is made after they were
    compiled.
    """
    module = Small()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in module.model.blocks if settings is not None else ():
        block.compile(backend="aot_eager")  # type: ignore[operator]
    trace_rules.clear_lru_cache()
    try:
        trainer_of(world_size, settings).fit(module, small_loader(4))
        return weights(module), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch._dynamo.reset()


SETTINGS = {
    "ring": RING,
    "ulysses": ULYSSES,
    "fsdp": {**RING, "data_parallel": "fsdp"},
}


@pytest.mark.quick("ring-check")
@pytest.mark.parametrize("check", ["check", "unchecked"])
@pytest.mark.parametrize("settings", list(SETTINGS))
def test_blocks_that_call_scaled_dot_product_attention(settings: str, check: str) -> None:
    parity = "first_batch" if check == "check" else "off"
    ours = {**SETTINGS[settings], "parity_check": parity}
    want, _ = run_ranks(1, plain_blocks, None)[0]
    for got, graphs in run_ranks(2, plain_blocks, ours, timeout=240.0):
        assert graphs >= 2, "attention is left to Python between two graphs"
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
