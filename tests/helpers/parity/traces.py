"""Modules whose first steps are others than a check of them: what it touched would change the run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.parity.modules import FEATURES, Healthy


class Extra(Healthy):
    """A second path, which ``is_used`` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(FEATURES, FEATURES)

    def is_used(self, step: int) -> bool:
        raise NotImplementedError

    def logits(self, batch: Any) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.places(self.positions(batch))
        for block in self.blocks:
            x = block(x)
        if self.is_used(self.step):
            x = x + self.extra(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.step = batch_idx
        return super().training_step(batch, batch_idx)


class WarmsUp(Extra):
    """Evaluation has a path that training has not before its third step."""

    def is_used(self, step: int) -> bool:
        return not self.training or step >= 2


class UsedOnce(Extra):
    """Training has a path in the first step alone."""

    def is_used(self, step: int) -> bool:
        return step == 0


class InEvaluation(Extra):
    """Evaluation has one, training never."""

    def is_used(self, step: int) -> bool:
        return not self.training


class DropsLayers(Healthy):
    """Layers are left out by chance, the same ones on all ranks."""

    def logits(self, batch: Any) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.places(self.positions(batch))
        for block in self.blocks:
            if not self.training or float(torch.rand(())) < 0.5:
                x = block(x)
        return self.head(self.norm(x))


class Recomputes(Healthy):
    """By a backward within the backward."""

    def logits(self, batch: Any) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.places(self.positions(batch))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


class Freezes(Extra):
    """A step decides what is trained from then on."""

    def is_used(self, step: int) -> bool:
        return True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.counted == 3:
            self.extra.requires_grad_(False)
        return loss


class HooksItself(Healthy):
    """Its first step hangs a hook on a module, and makes another one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if not hasattr(self, "hook"):
            self.hook = self.norm.register_forward_hook(lambda *args: 1.1 * args[2])
            self.norm.add_module("late", nn.Identity())
        return super().training_step(batch, batch_idx)


class MovesWeights(Healthy):
    """Trained weights that the step itself changes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.head.weight.mul_(0.9)
        self.head.bias.data.clamp_(-0.01, 0.01)
        return super().training_step(batch, batch_idx)


class ShrinksInBackward(Healthy):
    """Parameters that change whenever a gradient has come to them."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.head.parameters():
            p.register_post_accumulate_grad_hook(_shrink)


def _shrink(p: torch.Tensor) -> None:
    p.data.mul_(0.9)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Schedule:
    """A counter in an object of a class of the user's; another one in the class, and in a dict of it."""

    calls = 0

    def __init__(self) -> None:
        self.count, self.notes = 0, {"values": [0.0]}

    def __call__(self) -> float:
        self.count += 1
        type(self).calls += 1
        self.notes["values"].append(0.5**self.count)
        return 0.5**self.count + self.calls + self.notes["values"][-2]


class Slotted:
    """No ``__dict__``; one slot is empty until the first call."""

    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        last = getattr(self, "last", 3.0)
        self.count, self.last = self.count + 1, 0.5 * last
        return last + self.count


class Node:
    """A cycle; one of a pair is also an attribute by itself."""

    def __init__(self, name: str) -> None:
        self.name, self.value, self.other = name, 1.0, self

    def pair(self) -> Node:
        self.other = Node("pair")
        self.other.other = self
        return self


def counter() -> Any:
    """A function with a count in its cell, and one in an attribute."""
    count = 0

    def called() -> float:
        nonlocal count
        count += 1
        called.calls += 2  # type: ignore[attr-defined]
        return count + called.calls  # type: ignore[attr-defined]

    called.calls = 0  # type: ignore[attr-defined]
    return called


def falling() -> Iterator[float]:
    weight = 1.0
    while True:
        yield weight
        weight *= 0.5


class KeepsInObjects(Healthy):
    """Its loss falls by what objects, functions and iterators of its own have counted."""

    def __init__(self) -> None:
        super().__init__()
        Schedule.calls = 0
        self.schedule, self.nested = Schedule(), {"of": (Schedule(), [Slotted()])}
        self.node = Node("first").pair()
        self.other = self.node.other
        self.called, self.method = counter(), functools.partial(Schedule().__call__)
        self.list, self.count, self.falling = (
            iter([1.0, 2.0, 3.0] * 9),
            itertools.count(),
            falling(),
        )
        self.zipped = zip(itertools.count(), [1.0, 2.0] * 9, strict=False)
        self.same = self.falling
        self.array = np.zeros(2)
        self.hidden = [nn.BatchNorm1d(3), nn.Linear(2, 2).requires_grad_(False)]
        self.of_frame, self.drawn = itertools.cycle([0.25, 0.5, 1.0]), list[float]()

        def framed() -> float:
            return next(self.of_frame)

        self.framed = framed

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        of = self.nested["of"]
        own = self.schedule() + of[0]() + of[1][0]() + self.called() + self.method() + self.framed()
        own += next(self.list) + next(self.count) + next(self.falling) + next(self.same)
        own += sum(next(self.zipped))
        self.node.value, self.other.value = self.other.value + 1, self.node.value + 2
        self.array += 1
        norm, teacher = self.hidden
        norm(torch.randn(4, 3))
        teacher.weight.data.add_(1)
        own += self.node.value + float(
            self.array[0] + norm.running_mean.sum() + teacher.weight.sum()
        )  # type: ignore[union-attr,operator]
        self.drawn.append(own)
        return super().training_step(batch, batch_idx) * own
