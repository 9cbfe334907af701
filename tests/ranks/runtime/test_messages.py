"""The messages of a training step: how many there are, and that none is missing when ranks differ."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError, LightningCPError, RankFailure
from lightning_cp.models import handle
from lightning_cp.strategies import fabric
from tests.helpers.pool import RankError, expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.runs import (
    HFModule,
    PlainModule,
    Run,
    make_data,
    make_module,
    make_trainer,
)
from tests.helpers.strategies.small import VOCAB

RING = (("ring_size", 2), ("ulysses_size", 1))
TWO_GROUPS = (*RING, ("data_parallel_size", 2))
Batch = dict[str, torch.Tensor]
SMALL_MESSAGES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier")
"""Attention has its own; buckets of gradients travel while backward goes on, and are not counted."""


class PerStep(pl.Callback):
    """What is counted from the start of one batch to that of the next; ends of batches might be logged."""

    def __init__(self, counts: Counter[str]) -> None:
        self.found: list[dict[str, int]] = []
        self._counts = counts

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self.found.append(dict(self._counts))
        self._counts.clear()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of the functions that send small messages, and of the one that plans attention."""
    counts: Counter[str] = Counter()

    def counting(name: str, own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += not kwargs.get("async_op", False)
            return own(*args, **kwargs)

        return call

    places = [*((dist, name) for name in SMALL_MESSAGES), (handle, "make_plan")]
    patches = [
        mock.patch.object(where, name, counting(name, getattr(where, name)))
        for where, name in places
    ]
    for patch in patches:
        patch.start()
    try:
        yield counts
    finally:
        for patch in patches:
            patch.stop()


def fit(rank: int, world_size: int, run: Run) -> dict[str, int]:
    """Every rank of a cp group has targets; what the third step took, which the parity check comes before."""
    torch.set_default_dtype(torch.float64)
    data: Any = make_data(run)[: 4 * run.rows * (2 if run.sampler else 1)]
    for sample in data:
        sample["labels"] = sample["input_ids"] % VOCAB
    rows: Any = DataLoader(data, batch_size=1)
    with counted() as counts:
        watch = PerStep(counts)
        make_trainer(run, world_size, [watch]).fit(make_module(run), rows, rows)
    return watch.found[3]


LOADER = BATCH = CALL = MASK = STEP = FINITE = 1
VALUES = 1
KINDS = {
    "plain": (Run(RING), LOADER + BATCH + STEP + FINITE, 1),
    "Hugging Face": (Run(RING, model="hf"), LOADER + BATCH + CALL + STEP + FINITE, 1),
    "packed": (Run(RING, model="hf", packed=True), LOADER + BATCH + CALL + MASK + STEP + FINITE, 1),
    "two data ranks": (Run(TWO_GROUPS, sampler=True), LOADER + BATCH + STEP + FINITE, 1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_a_step(kind: str) -> None:
    """Votes; one gather of values, logged and shown alike; and a plan for each kind of attention call."""
    run, votes, plans = KINDS[kind]
    ranks = 4 if run.sampler else 2
    want = {"all_reduce": votes, "all_gather": VALUES, "make_plan": plans}
    assert run_ranks(ranks, fit, run) == [want] * ranks


# -- what is told later is told ------------------------------------------------------------------------


class AddsOnOneRank(HFModule):
    """The model's output has another loss than its loss function made, where ranks go on together."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.register_forward_hook(_add_on_the_last_rank)

    def loss(self, batch: Batch) -> torch.Tensor:
        loss = super().loss(batch)
        dist.barrier()
        return loss


def _add_on_the_last_rank(model: Any, args: Any, output: Any) -> None:
    if dist.get_rank() == 1 and output.loss is not None:
        output.loss = output.loss + 1


class ByHand(AddsOnOneRank):
    """Optimizes by hand: nobody looks at the loss but backward."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class WithoutLoss(PlainModule):
    """Returns none on the first rank."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if dist.get_rank() else None


class OfAnotherShape(PlainModule):
    """Returns losses of different shapes."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if dist.get_rank() else loss[None]


class WithoutGraph(PlainModule):
    """Returns a number on one rank, which has targets."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if dist.get_rank() else torch.tensor(0.0)


class WithoutGraphInOneGroup(PlainModule):
    """Returns a number on the ranks that share the first sample."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if dist.get_rank() > 1 else torch.tensor(0.0)


class WithoutLossInOneGroup(PlainModule):
    """Returns none on the ranks that share the first sample."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if dist.get_rank() > 1 else None


def refused(rank: int, world_size: int, kind: type[PlainModule], stage: str = "fit") -> None:
    """Come to the error, with the weights as they were; four ranks have two samples."""
    model = "hf" if issubclass(kind, HFModule) else "plain"
    run = Run(TWO_GROUPS if world_size == 4 else RING, model=model, sampler=world_size == 4)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    module: pl.LightningModule = kind(run)
    before = [p.detach().clone() for p in module.parameters()]
    data: Any = DataLoader(make_data(run)[:2], batch_size=1)  # type: ignore[arg-type]
    try:
        trainer = make_trainer(run, world_size, [])
        trainer.fit(module, data, data) if stage == "fit" else trainer.validate(module, data)
    finally:
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "stage"), [(AddsOnOneRank, "fit"), (ByHand, "fit"), (AddsOnOneRank, "validate")]
)
def test_what_one_rank_finds_in_a_step_is_told_to_all(kind: Any, stage: str) -> None:
    """The rank goes through the step's own collectives first: nobody waits for it in vain."""
    with pytest.raises(RankError) as caught:
        run_ranks(2, refused, kind, stage, timeout=20)
    errors = caught.value.errors
    assert isinstance(errors[1], ConfigError)
    assert isinstance(errors[0], RankFailure)
    for error in errors.values():
        assert "LlamaForCausalLM returns another loss" in str(error)


@pytest.mark.quick("WithoutGraph")
@pytest.mark.parametrize("kind", [WithoutLoss, OfAnotherShape, WithoutGraph])
def test_losses_that_do_not_fit_are_refused_on_every_rank(kind: Any) -> None:
    match = "training_step returned no loss"
    expect_on_every_rank(2, refused, kind, error=ConfigError, match=match, timeout=20)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind", [WithoutLoss, WithoutLossInOneGroup, OfAnotherShape, WithoutGraphInOneGroup]
)
def test_losses_of_one_data_rank_that_do_not_fit_are_refused_by_all(kind: Any) -> None:
    match = "training_step returned no loss"
    expect_on_every_rank(4, refused, kind, error=ConfigError, match=match, timeout=15)


def one_call(rank: int, world_size: int) -> None:
    """Fabric: no step ends, so that checks are told at once, also without backward."""
    from lightning.fabric import Fabric

    run = Run(RING, model="hf")
    torch.manual_seed(1)
    settings: Any = dict(RING)
    strategy = fabric.UlyssesRingStrategy(**settings)
    lightning = Fabric(
        accelerator="cpu", devices=world_size, strategy=strategy, plugins=[PoolEnvironment()]
    )
    lightning.launch()
    model: Any = lightning.setup(AddsOnOneRank(run).model)
    batch = {name: x[None] for name, x in make_data(run)[0].items()}
    with torch.no_grad():
        model(**strategy.shard_batch(batch, training=False))


def test_without_a_trainer_checks_are_told_at_once() -> None:
    match = "LlamaForCausalLM returns another loss"
    expect_on_every_rank(2, one_call, error=LightningCPError, match=match, timeout=20)


def refuse_and_forget(rank: int, world_size: int) -> tuple[bool, str]:
    """Whether the model attends with PyTorch's own function after its strategy is gone."""
    before = F.scaled_dot_product_attention
    error = ""
    try:
        one_call(rank, world_size)
    except LightningCPError as refused:
        error = str(refused)
    gc.collect()
    return F.scaled_dot_product_attention is before, error


@pytest.mark.nightly
def test_a_refused_call_does_not_keep_its_strategy_alive() -> None:
    for undone, error in run_ranks(2, refuse_and_forget, timeout=20):
        assert "LlamaForCausalLM returns another loss" in error
        assert undone


class AsksAlone(HFModule):
    """One rank's call of the model is refused, before the models inside are called."""

    def loss(self, batch: Batch) -> torch.Tensor:
        more = {"output_attentions": True} if dist.get_rank() == 1 else {}
        return self.model(**self.inputs(batch), labels=batch["labels"], **more).loss


def test_a_call_that_one_rank_refuses_is_told_before_attention() -> None:
    match = "output_attentions=True"
    expect_on_every_rank(2, refused, AsksAlone, error=LightningCPError, match=match, timeout=20)


class AveragesOnTheWay(AsksAlone):
    """Ranks exchange something between the refused call and the one of the model inside."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.model.register_forward_pre_hook(self._exchange)

    def _exchange(self, model: Any, args: Any) -> None:
        strategy: Any = self.trainer.strategy
        strategy.average(torch.zeros(()))
        strategy.unshard(torch.zeros(1, 31), 1)


def test_a_call_that_one_rank_refuses_is_told_before_values_are_exchanged() -> None:
    match = "output_attentions=True"
    error = LightningCPError
    expect_on_every_rank(2, refused, AveragesOnTheWay, error=error, match=match, timeout=15)


class LearnsElsewhere(PlainModule):
    """Attention of one rank is given no gradients."""

    def loss(self, batch: Batch) -> torch.Tensor:
        with torch.set_grad_enabled(dist.get_rank() != 1):
            loss = super().loss(batch)
        return loss + 0 * torch.stack([p.sum() for p in self.parameters()]).sum()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (AsksAlone, "rank 1 raised ConfigError: LlamaForCausalLM is called with output_attentions"),
        (
            LearnsElsewhere,
            r"other attention calls .* \(rank 0: calls \[0, 1\], rank 1: calls \[\]\)",
        ),
    ],
)
def test_what_one_data_rank_finds_is_told_to_the_others(kind: Any, match: str) -> None:
    """Those wait for it at the end of the step, and after that in backward."""
    with pytest.raises(RankError) as caught:
        run_ranks(4, refused, kind, timeout=15)
    errors = caught.value.errors
    assert all(isinstance(errors[rank], LightningCPError) for rank in range(4))
    for rank in (2, 3):
        assert re.search(match, str(errors[rank]))


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
