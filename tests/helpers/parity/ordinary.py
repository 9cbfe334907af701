"""Modules that are well and do what others do: keep state, draw numbers, take their batch apart."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.utils.labels import IGNORED_LABEL
from tests.helpers.parity.modules import VOCAB, Healthy


def declare_targets(module: Healthy, batch: Any) -> None:
    """Say what the loss is a mean over, which is not known of one times a tensor, or with other terms."""
    strategy: Any = module.trainer.strategy
    strategy.count_targets(batch["labels"] != IGNORED_LABEL)


class Counts(Healthy):
    """Its loss grows with how often it was computed, which it notes in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))
        self.seen = torch.zeros(())  # no buffer
        self.weight, self.notes = 0.0, {"steps": [0]}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.steps += 1
        self.seen += 1
        self.mean = 0.5 * self.mean + 1.0  # another tensor
        self.weight += 0.25
        self.notes["steps"].append(len(self.notes["steps"]))
        declare_targets(self, batch)
        return loss * (self.weight + self.steps + self.seen + self.mean + self.notes["steps"][-1])


class Draws(Healthy):
    """Numbers of its own, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)
        self.arrays, self.numbers = np.random.default_rng(4), random.Random(5)
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        own = float(torch.rand((), generator=self.draws)) + self.arrays.random()
        own += self.numbers.random() + random.random() + np.random.rand() + float(torch.rand(()))
        self.drawn.append(own)
        return super().training_step(batch, batch_idx) * own


class TakesApart(Healthy):
    """Takes its labels out of the batch, and changes what it was given."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        labels = batch.pop("labels")
        own = {"input_ids": batch["input_ids"].clone(), "labels": labels.clone()}
        loss = super().training_step({**batch, **own}, batch_idx)
        labels.fill_(-100)
        batch["input_ids"].zero_()
        batch.get("table", labels).zero_()
        return loss


class Follows(Healthy):
    """Its teacher, not trained, follows it in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.student = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for of, to in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            to.data.mul_(0.9).add_(0.1 * of.data)
        apart = self.student(torch.ones(4)) - self.teacher(torch.ones(4)) - 1
        loss = super().training_step(batch, batch_idx)
        declare_targets(self, batch)
        return loss + 0.1 * apart.square().mean()


class Noisy(Healthy):
    """Noise for each token, in evaluation too."""

    noise = staticmethod(lambda x: torch.randn_like(x))

    def logits(self, batch: Any) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.places(self.positions(batch))
        x = x + 0.3 * self.noise(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NoisyUnseen(Noisy):
    """By a function that is held where it is not replaced: other numbers on a rank than in one process."""

    noise = staticmethod(torch.randn_like)


class WritesToItsLogger(Healthy):
    """Not through ``self.log``."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        logger: Any = self.logger
        logger.log_metrics({"own": float(loss.detach())})
        logger.experiment.write("own")
        return loss


class Balanced(Healthy):
    """A term beside the mean over targets that is no mean: the square of how far logits are used."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        used = logits.softmax(-1).mean((0, 1))
        return super().loss(logits, batch) + VOCAB * used.square().sum()


class Pairs(Healthy):
    """Batches are tuples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, labels = batch
        positions = self.token_positions(ids)  # type: ignore[operator]
        logits = self.logits({"input_ids": ids, "position_ids": positions})
        return self.loss(logits, {"labels": labels})


class HalfLoss(Healthy):
    """A float32 model whose loss is computed in bfloat16."""

    reduction = "mean"

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        tokens, targets = logits.flatten(0, 1).bfloat16(), batch["labels"].flatten()
        return F.cross_entropy(tokens, targets, reduction=self.reduction)


class HalfSum(HalfLoss):
    """The same as a sum over what a rank has."""

    reduction = "sum"


class OwnAutocast(Healthy):
    """A float32 model that goes to bfloat16 by itself, whatever the Trainer's precision."""

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def logits(self, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().logits(batch).float()
