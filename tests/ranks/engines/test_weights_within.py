"""Weights and gradients that a step itself changes, under engines that gather parameters for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.errors import ConfigError
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import (
    LENGTH,
    RING,
    RING3,
    VOCAB,
    Batch,
    Settings,
    Small,
    close,
    loader,
    trainer_of,
    weights,
)


class ByHand(Small):
    """Optimizes by hand; what it does between backward and the step, and after it, is overridden."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.between(batch)
        optimizer.step()
        with torch.no_grad():
            self.after()

    def between(self, batch: Batch) -> None:
        """Gradients are there."""

    def after(self) -> None:
        """The optimizer has stepped."""


class Clamps(ByHand):
    """A critic of Wasserstein's, by both ways of writing it."""

    def after(self) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            (parameter.data if number % 2 else parameter).clamp_(-0.2, 0.2)


class Looks(Clamps):
    """Computes its loss once more, with gradients, before the optimizer steps."""

    def between(self, batch: Batch) -> None:
        self.loss(batch)


class Clips(ByHand):
    """Clips by PyTorch's function, after it has looked at its loss."""

    def between(self, batch: Batch) -> None:
        with torch.no_grad():
            self.loss(batch)
        nn.utils.clip_grad_norm_(self.parameters(), 0.2)


class ClipsLate(ByHand):
    """Steps along the gradients of two batches, at the beginning of the third."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx and batch_idx % 2 == 0:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))


class Sharpness(ByHand):
    """Goes up along its gradients, and steps along those that it finds there."""

    def between(self, batch: Batch) -> None:
        all_of = [p for p in self.parameters() if p.grad is not None]
        ways = [0.5 * p.grad for p in all_of if p.grad is not None]
        with torch.no_grad():
            for parameter, way in zip(all_of, ways, strict=True):
                parameter.add_(way)
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter, way in zip(all_of, ways, strict=True):
                parameter.sub_(way)


class Target(ByHand):
    """Has a frozen network follow its own after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = PlainLlama(VOCAB, num_heads=4, num_kv_heads=2, layers=1).requires_grad_(False)

    def after(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.model.parameters(), strict=True):
            slow.lerp_(fast, 0.2)


class ZeroesAll(ByHand):
    """Drops all gradients of the module between forward and backward."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Skips(ByHand):
    """Leaves a batch out after its forward, and changes weights in the hook that follows."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:
            self.loss(batch)
        else:
            super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


class Shrinks(Small):
    """Automatic optimization: changes all weights before each forward."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9)
        return self.loss(batch)


class Replaces(Small):
    """Automatic optimization: gives parameters that are in no block new memory."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        for part in (self.model.embed, self.model.head):
            part.weight.data = part.weight.data * 0.9
        return self.loss(batch)


class ShrinksUnseen(Small):
    """Automatic optimization: changes weights by a way that PyTorch's versions of tensors do not show."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        for parameter in self.model.parameters():
            parameter.data.mul_(0.9)
        return self.loss(batch)


class Teacher(Target):
    """Automatic optimization: a frozen network follows in the step, and is called in it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        labels, places = batch["labels"], torch.arange(LENGTH)[None]
        with torch.no_grad():
            self.after()
            wanted = self.slow(batch["input_ids"], batch.get("position_ids", places)).argmax(-1)
        return F.cross_entropy(
            self.logits(batch).flatten(0, 1), torch.where(labels < 0, labels, wanted).flatten()
        )


class WithinForward(Small):
    """Normalizes the weights of a layer, within a block, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = self.model.blocks[0]
        layer.register_forward_pre_hook(self.normalize)

    @staticmethod
    def normalize(layer: Any, _: Any) -> None:
        if layer.training:
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(0.99)


BY_HAND = [Clamps, Looks, Clips, ClipsLate, Sharpness, Target, ZeroesAll, Skips]
AUTOMATIC = [Shrinks, ShrinksUnseen, Replaces, Teacher, WithinForward]


def trained(_rank: int, world_size: int, settings: Settings | None, kind: type[Small]) -> Any:
    module = kind()
    trainer_of(world_size, settings).fit(module, loader(8))
    return weights(module)


@pytest.mark.quick("fsdp-Clips", "fsdp-ClipsLate", "fsdp-Shrinks", "zero1-Looks", "zero1-Replaces")
@pytest.mark.parametrize("kind", [*BY_HAND, *AUTOMATIC])
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_what_a_step_changes_is_changed_as_in_one_process(engine: str, kind: type[Small]) -> None:
    (want,) = run_ranks(1, trained, None, kind)
    settings = {**RING, "data_parallel": engine, "parity_check": "off"}
    for got in run_ranks(2, trained, settings, kind):
        close(got, want)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [Clips, Shrinks])
def test_shards_of_other_sizes_and_copies_change_alike(kind: type[Small]) -> None:
    (want,) = run_ranks(1, trained, None, kind)
    for got in run_ranks(
        3, trained, {**RING3, "data_parallel": "fsdp", "parity_check": "off"}, kind
    ):
        close(got, want)
    two = {**RING, "data_parallel_size": 2, "parity_check": "off"}
    copies = {"data_parallel": "hsdp", "data_parallel_replicate_size": 2}
    (want, *_) = run_ranks(4, trained, {**two, "data_parallel": "ddp"}, kind)
    for got in run_ranks(4, trained, {**two, **copies}, kind):
        close(got, want)


class ReplacesShards(Small):
    """Gives all parameters new memory between two steps, which PyTorch ignores for DTensors."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data * 0.9


class Twice(ByHand):
    """Changes whole parameters, and has the optimizer step before any backward has used them."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with torch.no_grad():
            self.model.head.weight.mul_(0.9)
        optimizer.step()


def refused(_rank: int, world_size: int, kind: type[Small], more: Settings) -> str:
    torch.set_default_dtype(torch.float32)
    module = kind().float()
    torch.set_default_dtype(torch.float32)
    settings = {**RING, "parity_check": "off", **more}
    with pytest.raises(ConfigError) as raised:
        trainer_of(world_size, settings).fit(module, loader(6))
    return str(raised.value)


HALF = {"data_parallel": "fsdp", "mixed_precision": "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        (
            Shrinks,
            HALF,
            "model.embed.weight, model.norm.weight, model.head.weight: changed in place while",
        ),
        (
            ReplacesShards,
            {"data_parallel": "fsdp"},
            "`parameter.data = ...` of a sharded",
        ),
        (
            Twice,
            {"data_parallel": "zero1"},
            "model.head.weight: changed in place in the step before an",
        ),
    ],
)
def test_a_change_that_would_be_lost_is_refused_by_name(
    kind: type[Small], more: Settings, said: str
) -> None:
    for message in run_ranks(2, refused, kind, more):
        assert said in message
