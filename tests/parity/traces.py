"""Modules whose first steps are others than a check of them: what it touched would change the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.modules import FEATURES, Healthy


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
