"""Positions: batches of any kind have them, and a step that does not ask for them is told."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from lightning_cp import ContextParallelMixin
from lightning_cp.batch.rules import TrackedBatch
from lightning_cp.fabric import UlyssesRingStrategy as Fabrics
from tests.helpers.models.steps import Case, make_model
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.kinds import plain
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    Batch,
    Settings,
    Small,
    close,
    loader,
    samples,
    trainer_of,
    weights,
)


class OfATuple(ContextParallelMixin, Small):
    """A batch that cannot carry positions, and a module that asks for them."""

    def loss(self, batch: Batch) -> torch.Tensor:
        ids, labels = batch
        logits = self.model(ids, self.token_positions(ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def fit_tuples(rank: int, world_size: int, settings: Settings | None) -> torch.Tensor:
    module = OfATuple()  # first: random labels depend on the default dtype that it sets
    pairs = [(sample["input_ids"], sample["labels"]) for sample in samples(8)]
    data: Any = DataLoader(pairs, batch_size=2)  # type: ignore[arg-type]
    if settings is not None:
        settings = {**settings, "sequence_dims": {"0": 1, "1": 1}, "label_key": "1"}
    trainer_of(world_size, settings).fit(module, data)
    return weights(module)


@pytest.mark.nightly
def test_a_module_asks_for_the_positions_of_a_tuple() -> None:
    (alone,) = run_ranks(1, fit_tuples, None)
    close(alone, plain("small"))
    for got in run_ranks(4, fit_tuples, HYBRID):
        close(got, alone)


class ReadsByName(ContextParallelMixin, Small):
    """Reads positions from every batch, as a module written for several ranks does."""

    def logits(self, batch: Batch) -> torch.Tensor:
        return self.model(batch["input_ids"], batch["position_ids"])


def fit_by_name(rank: int, world_size: int, settings: Settings) -> torch.Tensor:
    module = ReadsByName()
    trainer_of(world_size, settings).fit(module, loader(8))
    return weights(module)


@pytest.mark.quick("{}")
@pytest.mark.parametrize(
    "settings", [{}, {"data_parallel": "fsdp"}, {"context_parallel_size": 1}], ids=str
)
def test_positions_are_there_on_one_rank(settings: Settings) -> None:
    """Debugging a module on one device takes no second way of counting tokens."""
    for got in run_ranks(1, fit_by_name, settings):
        close(got, plain("small"))


@pytest.mark.quick("ddp")
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero1"])
def test_positions_are_there_where_only_data_is_shared(engine: str) -> None:
    """Both ranks get the same samples, because nothing is distributed here."""
    settings = {"context_parallel_size": 1, "data_parallel": engine, "data_parallel_size": 2}
    for got in run_ranks(2, fit_by_name, settings):
        close(got, plain("small"))


class OfTargets(ReadsByName):
    """Computes its loss from targets that were shifted for it."""

    def loss(self, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())


def fit_of_targets(rank: int, world_size: int, settings: Settings) -> torch.Tensor:
    module = OfTargets()
    trainer_of(world_size, {**settings, "labels": "shift"}).fit(module, loader(8))
    return weights(module)


def test_targets_are_there_on_one_rank() -> None:
    """The same module runs on one rank and on several, and computes the same."""
    (alone,) = run_ranks(1, fit_of_targets, {})
    for got in run_ranks(2, fit_of_targets, {**RING, "parity_check": "off"}):
        close(got, alone)


def of_fabric(rank: int, world_size: int) -> None:
    fabric: Any = L.Fabric(accelerator="cpu", devices=1, strategy=Fabrics())
    fabric.launch()
    fabric.setup(nn.Linear(3, 3))
    shard = fabric.strategy.shard_batch
    own = {"input_ids": torch.zeros(2, 5), "position_ids": torch.ones(2, 5)}
    for given in ({"x": 1}, {"input_ids": torch.zeros(2)}, [torch.zeros(2, 5)], own, 3):
        assert shard(given) is given, (
            "one rank refuses no batch for what several could not do with it"
        )
    batch = {"input_ids": torch.zeros(2, 5), "labels": torch.zeros(2, 5)}
    for kind in (dict, OrderedDict, BatchEncoding):
        given = kind(batch)
        local = shard(given)
        assert type(local) is kind
        assert local["position_ids"].tolist() == [[*range(5)]] * 2
        assert "position_ids" not in given
        copied = apply_to_collection(local, torch.Tensor, lambda x: x.half())
        assert "position_ids" in copied
        assert "position_ids" in pickle.loads(pickle.dumps(local))


def test_batches_of_one_rank_have_positions() -> None:
    run_ranks(1, of_fabric)


def keys_for(rank: int, world_size: int, name: str) -> list[str]:
    fabric: Any = L.Fabric(accelerator="cpu", devices=1, strategy=Fabrics())
    fabric.launch()
    fabric.setup(make_model(Case(model=name)))
    return sorted(fabric.strategy.shard_batch({"input_ids": torch.zeros(2, 5, dtype=torch.long)}))


@pytest.mark.quick("llama-True", "opt-False")
@pytest.mark.parametrize(
    ("name", "told"), [("llama", True), ("bert", True), ("roberta", False), ("opt", False)]
)
def test_models_that_count_otherwise_are_told_nothing_on_one_rank(name: str, told: bool) -> None:
    (found,) = run_ranks(1, keys_for, name)
    assert found == ["input_ids", *["position_ids"] * told]


def targets_for(rank: int, world_size: int, labels: str) -> Any:
    fabric: Any = L.Fabric(accelerator="cpu", devices=1, strategy=Fabrics(labels=labels))
    fabric.launch()
    model = fabric.setup(make_model(Case()))
    ids = torch.arange(10).reshape(2, 5)
    batch = fabric.strategy.shard_batch({"input_ids": ids, "labels": ids})
    assert model(**batch).loss.isfinite()
    odd = fabric.strategy.shard_batch({"input_ids": ids, "labels": torch.zeros(2, 5, 3)})
    assert "position_ids" in odd, "labels of another kind are nobody's business on one rank"
    return batch.get("shift_labels", torch.empty(0)).tolist()


@pytest.mark.quick("shift-targets0")
@pytest.mark.parametrize(
    ("labels", "targets"),
    [
        ("shift", [[1, 2, 3, 4, -100], [6, 7, 8, 9, -100]]),
        ("auto", [[1, 2, 3, 4, -100], [6, 7, 8, 9, -100]]),
        ("aligned", []),
    ],
)
def test_targets_on_one_rank_are_those_of_the_next_tokens(labels: str, targets: Any) -> None:
    assert run_ranks(1, targets_for, labels) == [targets]


class CountsItself(Small):
    """Every rank counts its tokens from 0."""

    def logits(self, batch: Batch) -> torch.Tensor:
        ids = batch["input_ids"]
        return self.model(ids, torch.arange(ids.shape[1])[None])


class PassesOn(Small):
    """Gives the model everything that is in the batch."""

    def logits(self, batch: Batch) -> torch.Tensor:
        def call(input_ids: torch.Tensor, position_ids: torch.Tensor, labels: Any) -> torch.Tensor:
            return self.model(input_ids, position_ids)

        return call(**batch)


class Takes(Small):
    """Takes the positions out of the batch."""

    def logits(self, batch: Batch) -> torch.Tensor:
        return self.model(batch["input_ids"], batch.pop("position_ids"))


class Maps(Small):
    """Maps over the tensors of its batch, as any dict allows."""

    def logits(self, batch: Batch) -> torch.Tensor:
        mapped: Any = tree_map(lambda x: x + 0, batch)
        assert type(mapped) is dict
        return super().logits(mapped)


class TupleWithoutPositions(Small):
    """A batch that carries no positions, and a module that counts."""

    def loss(self, batch: Batch) -> torch.Tensor:
        ids, labels = batch
        logits = self.model(ids, torch.arange(ids.shape[1])[None])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def messages(rank: int, world_size: int, kind: type[Small]) -> list[str]:
    import logging

    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_cp")
    logger.addHandler(handler)
    settings, data = {**HYBRID, "parity_check": "off"}, loader(6)
    if kind is TupleWithoutPositions:
        settings = {**settings, "sequence_dims": {"0": 1, "1": 1}, "label_key": "1"}
        pairs = [(sample["input_ids"], sample["labels"]) for sample in samples(6)]
        data = DataLoader(pairs, batch_size=2)  # type: ignore[arg-type]
    try:
        trainer_of(world_size, settings).fit(kind(), data)
    finally:
        logger.removeHandler(handler)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [CountsItself, TupleWithoutPositions])
def test_a_step_that_does_not_read_positions_is_told_once(kind: type[Small]) -> None:
    first, *others = run_ranks(4, messages, kind)
    assert len(first) == 1
    assert "took no positions from the batch" in first[0]
    assert others == [[], [], []]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [Small, PassesOn, Takes, Maps])
def test_a_step_that_reads_positions_is_not(kind: type[Small]) -> None:
    assert run_ranks(4, messages, kind) == [[]] * 4


@pytest.mark.parametrize(
    ("use", "read"),
    [
        (lambda batch: batch["position_ids"], True),
        (lambda batch: batch.get("position_ids"), True),
        (lambda batch: batch.pop("position_ids"), True),
        (lambda batch: dict(**batch), True),
        (lambda batch: [*batch.items()], True),
        (lambda batch: batch["input_ids"], False),
        (lambda batch: batch.get("labels"), False),
        (lambda batch: [*batch.values()], False),
        (lambda batch: "position_ids" in batch, False),
    ],
)
def test_what_counts_as_reading(use: Any, read: bool) -> None:
    batch = TrackedBatch(input_ids=1, position_ids=2)
    use(batch)
    assert batch.positions_read == read
    assert batch.get("nothing", 3) == 3
    with pytest.raises(KeyError):
        batch.pop("nothing")
