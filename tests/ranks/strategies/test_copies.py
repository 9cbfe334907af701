"""Trainers, and what refers to them, can be copied and pickled, in a run and after it, as with DDP."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_cp.utils.patching import PatchSet
from lightning_cp.watchdog.phase import Position, ProgressHooks, Slot
from tests.helpers.memory.runs import Module, Run
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    ULYSSES,
    Settings,
    Small,
    Staged,
    loader,
    trainer_of,
    weights,
)
from tests.helpers.suites import nightly_but
from tests.ranks.strategies.test_fabric import fabric_of

WAYS: dict[str, tuple[int, Settings]] = {
    "ring": (2, RING),
    "ring 3": (3, {"ring_size": 3, "ulysses_size": 1}),
    "ulysses": (2, ULYSSES),
    "hybrid": (4, HYBRID),
    "alone": (1, {"context_parallel_size": 1}),
}


class Copies(pl.Callback):
    """Copies itself, and the Trainer that it refers to, in every kind of stage."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.trainer = trainer

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        copied = copy.deepcopy(self)
        assert copied.trainer is not self.trainer
        assert copied.trainer.global_step == self.trainer.global_step

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        copy.deepcopy(self)


def pickled(thing: Any) -> Any:
    """What comes back of a file."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def fit(rank: int, world_size: int, settings: Settings) -> tuple[torch.Tensor, ...]:
    """Weights after two fits: of a Trainer, of a copy that was made before, and of copies made after one."""
    callback = Copies()
    trainer: Any = trainer_of(world_size, settings, callbacks=[callback], max_epochs=2)
    before = copy.deepcopy(trainer)
    module, again = Staged(), Staged()
    trainer.fit(module, loader(4), loader(2))
    before.fit(again, loader(4), loader(2))
    found = [weights(module), weights(again)]
    for made in (copy.deepcopy(trainer), pickled(trainer), copy.deepcopy(callback)):
        of_it: Any = getattr(made, "trainer", made)
        assert of_it.strategy.runtime is not trainer.strategy.runtime
        copied = of_it.lightning_module
        assert torch.equal(weights(copied), found[0])
        of_it.fit_loop.max_epochs = 3
        of_it.fit(copied, loader(4), loader(2))
        found.append(weights(copied))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(4), loader(2))
    return *found, weights(module)


@pytest.mark.nightly
@pytest.mark.parametrize("way", nightly_but("ring", "alone", of={name: name for name in WAYS}))
def test_copies_train_as_the_trainer_does(way: str) -> None:
    ranks, settings = WAYS[way]
    for first, again, *copies, last in run_ranks(ranks, fit, settings, timeout=120):
        assert torch.equal(again, first)
        assert not torch.equal(last, first)
        for one in copies:
            assert torch.equal(one, last)


def fabric(rank: int, world_size: int, settings: Settings) -> int:
    """A module that refers to its Fabric."""
    made = fabric_of(world_size, settings)
    made.launch()
    module = made.setup(Small())
    copied = copy.deepcopy(module.module)
    assert torch.equal(weights(copied), weights(module))
    own: Any = made.strategy
    other: Any = copy.deepcopy(made).strategy
    assert other.runtime is not own.runtime
    assert other.runtime.losses.question == own.runtime.losses.question
    return len(list(copied.parameters()))


@pytest.mark.nightly
def test_a_module_of_fabric() -> None:
    assert all(run_ranks(2, fabric, RING))


class Copied(Module):
    """Copies and pickles its network and itself in a run, in steps too; ``seen`` says where."""

    seen: tuple[str, ...] = ()
    waiting: Any = ()
    """Copies that were made in a step, to be called outside."""

    def look(self, where: str) -> None:
        if where in self.seen:
            return
        file = io.BytesIO()
        torch.save(self.model, file)
        assert b"lightning_cp" not in file.getvalue()  # it loads where the package is not installed
        made = [copy.deepcopy(self.model), pickled(self.model)]
        made += [copy.deepcopy(self).model, pickled(self).model]
        self.seen = (*self.seen, where)
        if where in ("training_step", "on_after_backward"):
            self.waiting = made
            return
        ids = torch.arange(7)[None]
        with torch.no_grad():
            want = self.model(ids).logits
            assert all(torch.equal(one(ids).logits, want) for one in made)
            for one in self.waiting:
                assert torch.isfinite(one(ids).logits).all()
                assert not torch.equal(one(ids).logits, want)  # of the weights that were
        self.waiting = ()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.look("training_step")
        return loss

    def on_after_backward(self) -> None:
        self.look("on_after_backward")

    def on_train_start(self) -> None:
        self.look("on_train_start")

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        self.look("on_train_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.look("on_validation_epoch_end")

    def on_train_end(self) -> None:
        self.look("on_train_end")


PLACES = ("on_train_start", "training_step", "on_after_backward", "on_train_batch_end")
LONG = {"chunked_loss": 5, "tiled_mlp": 7, "activation_checkpointing": "blocks"}
MODELS: dict[str, tuple[int, Settings]] = {
    "ring": (2, RING),
    "long": (2, {**RING, **LONG}),
    "data parallel": (2, {"context_parallel_size": 1, "data_parallel_size": 2}),
    "hybrid": (4, HYBRID),
}


def fit_model(rank: int, world_size: int, settings: Settings) -> tuple[str, ...]:
    """The places in which a module was copied."""
    torch.set_default_dtype(torch.float64)
    module = Copied(Run(tuple(settings.items())))
    given = {"labels": "auto", "parity_check": "off", **settings}
    trainer_of(world_size, given).fit(module, loader(4), loader(2))
    return module.seen


@pytest.mark.nightly
@pytest.mark.parametrize(
    "way", nightly_but("long", "data parallel", of={name: name for name in MODELS})
)
def test_models_are_copied_and_pickled_in_a_run(way: str) -> None:
    ranks, settings = MODELS[way]
    for seen in run_ranks(ranks, fit_model, settings, timeout=120):
        assert seen == (*PLACES, "on_validation_epoch_end", "on_train_end")


class CountedAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_copies_where_progress_is_followed() -> None:
    """Where each rank attends by itself: the position of this rank is in a file that is mapped."""
    position, attention, slot = Position(), CountedAttention(), Slot(token=bytes(16))
    try:
        position.connect(slot)
        progress = ProgressHooks(position)
        progress.follow(attention, attention=True)
        progress.begin_with(attention)
        made = [copy.deepcopy(attention), pickled(attention)]
        before = position.count
        assert made[1](torch.zeros(1)) == 1
        assert position.count == before
        attention(torch.zeros(1))
        assert position.count > before
        progress.forget()
        before = position.count
        assert made[0](torch.zeros(1)) == attention(torch.zeros(1))
        assert position.count == before
    finally:
        slot.unlink()
        slot.close()


class Served:
    """The owner of a method that an instance of it may have replaced itself."""

    def answer(self) -> str:
        return "own"


def others(served: Any) -> str:
    return f"the user's, of {type(served).__name__}"


def test_copies_have_the_method_that_was_replaced() -> None:
    plain, changed = Served(), Served()
    vars(changed)["answer"] = partial(others, changed)
    for served, want in ((plain, "own"), (changed, "the user's, of Served")):
        patches = PatchSet()
        patches.put_method(served, "answer", lambda: "ours")
        for made in (copy.deepcopy(served), pickled(served)):
            assert made.answer() == want
        assert served.answer() == "ours"
        patches.undo()
        assert served.answer() == want
