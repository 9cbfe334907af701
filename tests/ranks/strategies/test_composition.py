"""Composition of a strategy: places of overrides, order of components, two steps at once."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning.fabric.strategies as of_fabric
import lightning.pytorch.strategies as of_trainer
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule

from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.strategies import fabric, trainer
from lightning_cp.strategies.base import ContextParallelStrategy
from tests.helpers.models.steps import Case, make_batch, make_model, mean_gradients, start, step
from tests.helpers.pool import run_ranks

TWINS = {
    "trainer": (trainer.UlyssesRingStrategy, of_trainer.DDPStrategy),
    "fabric": (fabric.UlyssesRingStrategy, of_fabric.DDPStrategy),
}
OF_PYTHON = {"__init__", "__getstate__", "__setstate__", "__repr__"}


@pytest.mark.parametrize("name", TWINS)
def test_a_strategy_has_two_classes_of_its_own(name: str) -> None:
    strategy, lightning = TWINS[name]
    order = inspect.getmro(strategy)
    assert order[: order.index(lightning)] == (strategy, ContextParallelStrategy)


@pytest.mark.parametrize("name", TWINS)
def test_every_override_is_in_the_file_of_its_twin(name: str) -> None:
    _, lightning = TWINS[name]
    known = {attribute for kind in inspect.getmro(lightning)[:-1] for attribute in vars(kind)}
    common = {attribute for attribute, x in vars(ContextParallelStrategy).items() if callable(x)}
    assert known & common <= OF_PYTHON


# Order of components within one hook.


class Noted:
    """Stands in for a component: notes its name at each call."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def __getattr__(self, method: str) -> Any:
        def note(*_: Any, **__: Any) -> Any:
            self._said.append(self._name)
            return {}

        return note


class NotedWatch(Noted):
    """Its blocks are noted when they begin and when they end."""

    @contextmanager
    def during(self, _: Any) -> Any:
        self._said.append("watch")
        yield
        self._said.append("watch ends")


def noted_strategy(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    said: list[str] = []
    devices = [torch.device("cpu")]
    strategy: Any = trainer.UlyssesRingStrategy(context_parallel_size=1, parallel_devices=devices)
    strategy.cluster_environment = LightningEnvironment()
    module = LightningModule()
    module._trainer = SimpleNamespace(training=True, interrupted=False)  # type: ignore[assignment]
    strategy._lightning_module = module
    runtime = SimpleNamespace(
        meshes=SimpleNamespace(sizes={"ring": 1}),
        watch=SimpleNamespace(position=NotedWatch("watch", said)),
        end_watch=lambda: said.append("watch"),
        detach=lambda: None,
        records=SimpleNamespace(recorder=Noted("recorder", [])),
    )
    monkeypatch.setattr(strategy, "runtime", runtime)
    monkeypatch.setattr(strategy, "_position", runtime.watch.position)
    monkeypatch.setattr(strategy, "_resume", Noted("resume", said))
    monkeypatch.setattr(strategy, "_checkpoints", Noted("checkpoints", said))
    for hook in ("on_train_start", "on_validation_end", "on_train_end", "teardown"):
        monkeypatch.setattr(of_trainer.DDPStrategy, hook, lambda _: said.append("lightning"))
    return strategy, said


ORDERS: dict[str, tuple[str, ...]] = {
    "save_checkpoint": ("watch", "resume", "checkpoints", "watch ends"),
    "load_checkpoint": ("watch", "checkpoints", "resume", "watch ends"),
    "on_train_start": ("lightning", "checkpoints", "resume"),
    "on_validation_end": ("lightning", "resume"),
    "on_train_end": ("lightning", "checkpoints"),
    "teardown": ("watch", "checkpoints", "lightning"),
}
"""Components are nested as in ``HOOK_ORDER``: one acts on the way in, or on the way out."""
ARGUMENTS = {"save_checkpoint": ({}, "x.ckpt"), "load_checkpoint": ("x.ckpt",)}


@pytest.mark.parametrize("hook", ORDERS)
def test_components_act_in_order(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, said = noted_strategy(monkeypatch)
    getattr(strategy, hook)(*ARGUMENTS.get(hook, ()))
    assert tuple(said) == ORDERS[hook]
    depths = [trainer.HOOK_ORDER.index(part) for part in said if part in trainer.HOOK_ORDER]
    deepest = depths.index(max(depths))
    way_in, way_out = depths[: deepest + 1], depths[deepest:]
    assert way_in == sorted(way_in)
    assert way_out == sorted(way_out, reverse=True)


# Two steps alive at once.


def batches() -> list[dict[str, torch.Tensor]]:
    first = make_batch(Case())
    second = {name: x.flip(0)[:, :-4] for name, x in first.items()}
    second["labels"][:, 5:19] = -100
    return [first, second]


Values = tuple[float, float, torch.Tensor, dict[str, torch.Tensor]]


def finish(runtime: ContextParallelRuntime, model: Any, loss: Any, world_size: int) -> Values:
    """Backward of the current step, and everything that its weights decide."""
    current = runtime.step
    current.scale_loss(loss).backward()
    current.after_backward(model.parameters())
    assert current.part is not None
    ids = current.unshard(current.part.batch["input_ids"], 1)
    gradients = {name: x.clone() for name, x in mean_gradients(model, world_size).items()}
    model.zero_grad()
    return float(current.average(loss.detach())), float(sum(current.shares)), ids, gradients


def two_steps(rank: int, world_size: int, early: bool, ulysses: int) -> list[Values]:
    """Two steps; ``early``: the second batch is sharded before the backward of the first one."""
    model = make_model(Case())
    runtime = start(ulysses, world_size // ulysses, model)
    try:
        first, second = batches()
        local = runtime.shard(first, needs_labels=True)
        runtime.begin_step()
        loss, _ = step(Case(), model, local)
        ahead = runtime.prepare(second, needs_labels=True) if early else None
        found = [finish(runtime, model, loss, world_size)]
        runtime.end_step()
        if ahead is None:
            runtime.shard(second, needs_labels=True)
        else:
            runtime.enter(ahead)
        runtime.begin_step()
        loss, _ = step(Case(), model, runtime.step.batch)
        found.append(finish(runtime, model, loss, world_size))
        return found
    finally:
        runtime.detach()


@pytest.mark.quick("2-1")
@pytest.mark.parametrize(("ranks", "ulysses"), [(2, 1), (3, 1), (4, 2)])
def test_a_batch_that_is_sharded_early_leaves_the_step_before_as_it_was(
    ranks: int, ulysses: int
) -> None:
    wanted = [alone(batch) for batch in batches()]
    for early in (False, True):
        for got in run_ranks(ranks, two_steps, early, ulysses):
            for (loss, shares, ids, gradients), (whole, loss_alone, of_one) in zip(
                got, wanted, strict=True
            ):
                assert abs(loss - loss_alone) < 1e-12
                assert abs(shares - 1.0) < 1e-12
                assert torch.equal(ids, whole)
                for name, x in of_one.items():
                    torch.testing.assert_close(gradients[name], x, rtol=1e-10, atol=1e-12)


def alone(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """One process."""
    model = make_model(Case())
    loss, _ = step(Case(), model, dict(batch))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return batch["input_ids"], float(loss.detach()), gradients
