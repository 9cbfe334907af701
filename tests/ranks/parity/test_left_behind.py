"""A check leaves nothing behind, in what Python does not show either: the run is bit for bit that without."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader, Dataset

from lightning_cp.utils.dtensor import local_part
from tests.helpers.parity import modules, traces
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import HYBRID, RING, ULYSSES, trainer_of
from tests.ranks.parity.test_healthy import Heard

THREE = {"ring_size": 3, "ulysses_size": 1}
OFF, TWICE = {"parity_check": "off"}, {"parity_check": "every_2"}
NAMES = (
    *("WarmsUp", "UsedOnce", "InEvaluation", "DropsLayers", "Recomputes", "Freezes"),
    *("HooksItself", "ShrinksInBackward", "KeepsInObjects", "MovesWeights"),
)


def fit(
    rank: int, world_size: int, name: str, settings: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[float], list[str]]:
    """A run's weights, what it logged as its losses, and what was said of parity."""
    module = getattr(traces, name)()
    if settings.get("data_parallel", "ddp") == "ddp" and name != "Recomputes":
        settings = {**settings, "find_unused_parameters": True}
    with Heard() as heard:
        trainer_of(world_size, settings).fit(module, DataLoader(modules.rows(8), batch_size=2))  # type: ignore[arg-type]
    state = {key: local_part(x).clone() for key, x in module.state_dict().items()}
    return state, module.losses, heard.parity


def require_same(ranks: int, name: str, settings: dict[str, Any]) -> None:
    want = run_ranks(ranks, fit, name, {**settings, **OFF}, timeout=60)
    got = run_ranks(ranks, fit, name, {**settings, **TWICE}, timeout=60)
    for (state, losses, said), (state_without, losses_without, _) in zip(got, want, strict=True):
        assert losses == losses_without
        assert state.keys() == state_without.keys()
        assert [key for key in state if not torch.equal(state[key], state_without[key])] == []
        assert all("agree on" in line for line in said), said
    assert len(got[0][2]) == 2


class Drawing(Dataset[Any]):
    """Rows of numbers that a worker draws."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> Any:
        ids = torch.randint(0, modules.VOCAB, (modules.LENGTH,))
        return {"input_ids": ids, "labels": torch.randint_like(ids, modules.VOCAB)}


class Profiled(modules.Healthy):
    """Times its own step."""

    mixing = traces.Scaled

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with self.trainer.profiler.profile("own"):  # type: ignore[attr-defined]
            return super().training_step(batch, batch_idx)


def observed(
    rank: int, world_size: int, how: str, settings: dict[str, Any]
) -> tuple[list[float], dict[str, int], Counter[str], int]:
    """Losses of a run; how often its profiler, and torch's, saw what; and the graphs that it compiled."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    module, profiler, recorded = Profiled(), SimpleProfiler(), None
    if how == "compiled":
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for block in module.blocks:
            block.mixing.compile(backend="eager", dynamic=False)  # type: ignore[operator]
    with ExitStack() as stack:
        if how == "recorded":  # not with workers: what it holds is not to be forked
            activities = [torch.profiler.ProfilerActivity.CPU]
            recorded = stack.enter_context(torch.profiler.profile(activities=activities))
        loader = DataLoader(Drawing(), batch_size=2, num_workers=int(how == "workers"))
        trainer_of(world_size, settings, profiler=profiler).fit(module, loader)
    seen = {name: len(times) for name, times in profiler.recorded_durations.items()}
    events = recorded.events() or () if recorded else ()
    counts = Counter(event.name for event in events if event.name in OPERATORS)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if how == "compiled" else 0
    return module.losses, seen, counts, graphs


OPERATORS = ("aten::embedding", "aten::embedding_dense_backward", "aten::native_layer_norm")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how", ["recorded", "workers", pytest.param("compiled", marks=pytest.mark.nightly)]
)
def test_what_watches_a_run_sees_the_run(how: str) -> None:
    """Profilers, compiled graphs, and the random numbers of workers."""
    want = run_ranks(2, observed, how, {**RING, **OFF}, timeout=100)
    got = run_ranks(2, observed, how, {**RING, **TWICE}, timeout=100)
    assert got == want
    losses, seen, counts, graphs = want[0]
    assert len(losses) == seen["own"] == 4
    assert set(counts) == (set(OPERATORS) if how == "recorded" else set())
    assert bool(graphs) == (how == "compiled")


@pytest.mark.quick("MovesWeights")
@pytest.mark.parametrize("name", NAMES)
def test_the_run_is_the_one_without(name: str) -> None:
    require_same(2, name, RING)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DropsLayers", "HooksItself"])
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_engines_that_shard(engine: str, name: str) -> None:
    require_same(2, name, {**RING, "data_parallel": engine})


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "mode"), [(2, ULYSSES), (3, THREE), (4, HYBRID)], ids=str)
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero1"])
@pytest.mark.parametrize("name", NAMES)
def test_in_every_way(name: str, engine: str, ranks: int, mode: dict[str, Any]) -> None:
    require_same(ranks, name, {**mode, "data_parallel": engine})
