"""A step with QK-clip, by the Trainer and with Fabric: one process's weights, and scores of tau."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp.optim import Muon
from tests.helpers.optim.qk_models import Clipped, Watched, clipped_by_hand, llama, maxima_by_hand
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import HYBRID, RING, ULYSSES, Settings, trainer_of, whole
from tests.ranks.optim.test_qk_clip_maxima import Loop, batch_of

TAU, ALPHA, LR = 20.0, 0.3, 0.01
MESHES: dict[str, tuple[int, Settings]] = {
    "one rank": (1, {}),
    "ring": (2, RING),
    "ulysses": (2, ULYSSES),
    "hybrid": (4, HYBRID),
    "fsdp": (2, {**RING, "data_parallel": "fsdp"}),
    "zero1": (2, {**ULYSSES, "data_parallel": "zero1"}),
    "tp": (2, {"context_parallel_size": 1, "tensor_parallel_size": 2, "data_parallel": "fsdp"}),
    "fsdp and tp": (4, {**RING, "tensor_parallel_size": 2, "data_parallel": "fsdp"}),
    "hsdp": (
        4,
        {**RING, "data_parallel": "hsdp", "data_parallel_size": 2}
        | {"data_parallel_replicate_size": 2},
    ),
}
QUICK = ("one rank", "hybrid", "fsdp and tp")
EVERY = [x if x in QUICK else pytest.param(x, marks=pytest.mark.nightly) for x in MESHES]
Weights = dict[str, torch.Tensor]


@lru_cache
def by_hand(
    lr: float, layers: int
) -> tuple[Weights, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights after a step of plain SGD and the clip; the largest scores before and after."""
    model, batch = llama(layers), batch_of(0)
    before = maxima_by_hand(model, batch)
    ids = batch["input_ids"]
    logits = model(ids, torch.arange(ids.shape[1])[None])
    F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    stepped = {n: (p - lr * p.grad).detach() for n, p in model.named_parameters()}  # type: ignore[operator]
    weights = clipped_by_hand(stepped, before, TAU, ALPHA)
    model.load_state_dict(weights)
    return weights, before, maxima_by_hand(model, batch)


@lru_cache
def muon_by_hand() -> Weights:
    """Of one process that knows nothing of a clip, then clipped by hand."""
    model, batch = llama(), batch_of(0)
    before = maxima_by_hand(model, batch)
    ids = batch["input_ids"]
    logits = model(ids, torch.arange(ids.shape[1])[None])
    F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    Muon(model.named_parameters(), lr=LR, ns_dtype="float64").step()
    return clipped_by_hand(weights_of(model), before, TAU, ALPHA)


class WithMuon(Clipped):
    """Names begin with ``model.``: they are the whole module's."""

    def configure_optimizers(self) -> Any:
        return Muon(self.named_parameters(), lr=LR, ns_dtype="float64", qk_clip=self.clip)


Found = tuple[Weights, list[dict[str, list[float]]], dict[str, list[int]]]


class Keep(pl.Callback):
    """What there is after each step."""

    def __init__(self) -> None:
        self.weights: list[Weights] = []
        self.clipped: list[dict[str, list[int]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.weights.append(weights_of(pl_module.model))
        self.clipped.append(dict(pl_module.clip.clipped))


def weights_of(model: nn.Module) -> Weights:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def by_trainer(rank: int, world_size: int, settings: Settings, lr: float, layers: int) -> Found:
    """Two steps along one batch."""
    clip, keep = Watched(tau=TAU, alpha=ALPHA), Keep()
    module, batch = Clipped(clip, lr, layers), batch_of(0)
    data: Any = [{name: x[at] for name, x in batch.items()} for at in (0, 1)]
    trainer = trainer_of(world_size, settings, callbacks=[keep], max_epochs=2)
    trainer.fit(module, DataLoader(data, batch_size=2))
    return keep.weights[0], clip.steps, keep.clipped[0]


def by_fabric(rank: int, world_size: int, settings: Settings, lr: float, layers: int) -> Found:
    """The same in a loop."""
    clip = Watched(tau=TAU, alpha=ALPHA)
    loop = Loop(world_size, settings, clip, lr, layers)
    loop.run(batch_of(0))
    loop.step()
    kept = weights_of(loop.model.module)
    clipped = dict(clip.clipped)
    loop.run(batch_of(0))
    loop.step()
    return kept, clip.steps, clipped


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.quick("one rank-trainer")
@pytest.mark.parametrize("by", [by_trainer, by_fabric], ids=["trainer", "fabric"])
@pytest.mark.parametrize("mesh", EVERY)
def test_weights_of_one_process(mesh: str, by: Any) -> None:
    ranks, settings = MESHES[mesh]
    want, before, after = by_hand(LR, 2)
    assert float(before["blocks.0"][0]) < TAU < float(before["blocks.0"].max())
    for weights, steps, clipped in run_ranks(ranks, by, settings, LR, 2):
        for name, x in want.items():
            torch.testing.assert_close(weights[name], x, rtol=1e-12, atol=1e-12, msg=name)
        assert clipped == {"blocks.0": [2, 3], "blocks.1": [2, 3]}
        for step, wanted in zip(steps, (before, after), strict=True):
            for layer, largest in wanted.items():
                got = torch.tensor(step[layer], dtype=torch.float64)
                torch.testing.assert_close(got, largest, rtol=1e-7, atol=0)


@pytest.mark.quick(
    "hybrid-fabric", "tp-fabric", "ring-trainer", "ulysses-fabric", "one rank-trainer"
)
@pytest.mark.parametrize("by", [by_trainer, by_fabric], ids=["trainer", "fabric"])
@pytest.mark.parametrize("mesh", ["one rank", "ring", "ulysses", "hybrid", "tp"])
def test_scores_come_down_to_tau(mesh: str, by: Any) -> None:
    """One layer and no other step, so that nothing but the clip has changed its scores."""
    ranks, settings = MESHES[mesh]
    for _, (before, after), _ in run_ranks(ranks, by, settings, 0.0, 1):
        assert max(before["blocks.0"]) > 1.5 * TAU
        assert max(after["blocks.0"]) == pytest.approx(TAU, rel=1e-6)


def by_muon(rank: int, world_size: int, settings: Settings) -> tuple[Weights, Any]:
    """A step by the Trainer."""
    keep = Keep()
    module, batch = WithMuon(Watched(tau=TAU, alpha=ALPHA), LR), batch_of(0)
    data: Any = [{name: x[at] for name, x in batch.items()} for at in (0, 1)]
    trainer = trainer_of(world_size, settings, callbacks=[keep])
    trainer.fit(module, DataLoader(data, batch_size=2))
    return keep.weights[0], keep.clipped[0]


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", EVERY)
def test_muon(mesh: str) -> None:
    ranks, settings = MESHES[mesh]
    want = muon_by_hand()
    for weights, clipped in run_ranks(ranks, by_muon, settings):
        assert clipped == {"model.blocks.0": [2, 3], "model.blocks.1": [2, 3]}
        for name, x in want.items():
            assert float((weights[name] - x).abs().max()) <= 1e-12 * float(x.abs().max()), name
