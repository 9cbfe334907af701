"""Settings that save memory in whole runs: every engine, Trainer and Fabric, against one process without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.errors import ConfigError
from tests.helpers.memory.runs import Result, Run, execute
from tests.helpers.pool import expect_on_every_rank, run_ranks

CHUNK = ("chunked_loss", 5)
SURROUNDINGS = (
    ("tiled_mlp", 6),
    ("activation_checkpointing", "keep_attention"),
    ("activation_offload", True),
)
SAVING = {"chunked": (CHUNK,), "all": (CHUNK, *SURROUNDINGS)}


@lru_cache(maxsize=8)
def one_process(run: Run) -> Result:
    return run_ranks(1, execute, replace(run, settings=None), timeout=60)[0]


def compare(run: Run, ranks: int, tolerance: float = 2e-6) -> None:
    """The model's own loss is float32 in one process."""
    want = one_process(run)
    for got in run_ranks(ranks, execute, run, timeout=120):
        assert got.losses == pytest.approx(want.losses, rel=tolerance)
        assert got.val_loss == pytest.approx(want.val_loss, rel=tolerance)
        for name, weight in want.weights.items():
            worst = float((got.weights[name] - weight).abs().max() / weight.abs().max())
            assert worst <= tolerance, (name, worst)


@pytest.mark.quick(
    "Trainer-all-1-{'ring_size': 1}", "Fabric-chunked-2-{'find_unused_parameters': True}"
)
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, {"ring_size": 1}),
        (2, {}),
        (2, {"token_weighting": "global"}),
        (2, {"data_parallel": "fsdp", "wrap_modules": "LlamaDecoderLayer"}),
        (2, {"data_parallel": "zero1"}),
        (4, {"ulysses_size": 2}),
        (4, {"ulysses_size": 2, "data_parallel": "fsdp"}),
        (2, {"find_unused_parameters": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("saving", SAVING)
@pytest.mark.parametrize("fabric", [False, True], ids=["Trainer", "Fabric"])
def test_losses_and_weights_are_those_of_one_process(
    ranks: int, more: dict[str, Any], fabric: bool, saving: str
) -> None:
    compare(Run((*SAVING[saving], *more.items()), fabric), ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("saving", SAVING)
def test_weights_that_are_not_tied_and_windows_of_accumulation(saving: str) -> None:
    compare(Run((*SAVING[saving], ("data_parallel", "fsdp")), tied=False, accumulate=2), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_autocast(engine: str) -> None:
    """As near to one process without it as with all logits."""
    run = Run((("data_parallel", engine),), precision="bf16-mixed")
    want = one_process(replace(run, precision="32-true"))
    plain = run_ranks(2, execute, run, timeout=60)[0]
    assert run.settings is not None
    chunked = run_ranks(2, execute, replace(run, settings=(*run.settings, CHUNK)), timeout=60)[0]
    assert chunked.losses == pytest.approx(plain.losses, rel=2e-3)
    for name, weight in want.weights.items():
        ours, theirs = (float((x.weights[name] - weight).norm()) for x in (chunked, plain))
        assert ours <= 2 * theirs, name


def test_data_parallel_ranks_alone() -> None:
    """Nobody shares a sequence, and the loss is in chunks all the same."""
    run = Run((CHUNK, ("ring_size", 1), ("data_parallel_size", 2)), rows=1, steps=8)
    plain = Run(run.settings[1:] if run.settings else None, rows=1, steps=8)
    want, got = run_ranks(2, execute, plain)[0], run_ranks(2, execute, run)[0]
    assert got.losses == pytest.approx(want.losses, rel=2e-6)


class Collectives(TorchDispatchMode):
    """Counts what is communicated, by its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def collectives(rank: int, world_size: int, run: Run) -> dict[str, int]:
    """How often parameters were gathered, gradients reduced, and keys sent, in a run."""
    with Collectives() as found:
        execute(rank, world_size, run)
    return dict(found.counts)


@pytest.mark.nightly
@pytest.mark.parametrize("saving", [(("tiled_mlp", 6),), SAVING["all"]], ids=["tiled", "all"])
def test_parameters_are_gathered_as_often_as_without(saving: Any) -> None:
    """And attention communicates as often, since its results are kept."""
    plain = Run((("data_parallel", "fsdp"),))
    want = run_ranks(2, collectives, plain, timeout=60)
    got = run_ranks(
        2, collectives, replace(plain, settings=(*saving, ("data_parallel", "fsdp"))), timeout=60
    )
    assert got == want
    gathers, sends = want[0]["_allgather_base_.default"], want[0]["send.default"]
    assert gathers >= 2 * (2 + 1) * 4, "of two blocks and the model, in forward and backward"
    assert sends > 0


def test_a_part_of_an_mlp_that_is_sharded_by_itself() -> None:
    run = Run((("tiled_mlp", 6), ("data_parallel", "fsdp"), ("wrap_modules", "*.down_proj")))
    match = r"layers.0.mlp.down_proj is sharded by itself, and would be gathered for every tile"
    expect_on_every_rank(2, execute, run, error=ConfigError, match=match)
