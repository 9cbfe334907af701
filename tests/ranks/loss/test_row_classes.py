"""Classes of whole rows by a head of one's own: behind frozen layers, and beside a mean over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    RING3,
    VOCAB,
    Batch,
    Settings,
    Small,
    close,
    samples,
    trainer_of,
    weights,
)


class Classifier(ContextParallelMixin, Small):
    """Classes of the mean of a row's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(VOCAB, 3)

    def classes(self, logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.sequence_mean(logits)), torch.tensor([2, 0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Frozen(Classifier):
    """Trains the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)

    def loss(self, batch: Batch) -> torch.Tensor:
        return self.classes(self.logits(batch))


class FrozenAndWeighed(Frozen):
    """Weighs rows by another value of frozen layers."""

    def loss(self, batch: Batch) -> torch.Tensor:
        logits = self.logits(batch)
        weight = self.sequence_sum(logits[..., 0]).sigmoid()
        return (weight * self.head(self.sequence_pick(logits, -1)).square().mean(1)).sum()


class Conditioned(Frozen):
    """Classes of tokens, beside a value of frozen layers."""

    def loss(self, batch: Batch) -> torch.Tensor:
        logits = self.logits(batch)
        logits = self.head(logits) + self.head(self.sequence_mean(logits))[:, None]
        labels = batch["labels"].where(batch["labels"] < 0, batch["labels"] % 3)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Mixed(Classifier):
    """Some tokens are targets: more of them on the first rank."""

    def loss(self, batch: Batch) -> torch.Tensor:
        ids, logits = batch["input_ids"], self.logits(batch)
        mask = (ids % 3 > 0) & (batch["position_ids"] < 12)
        losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)
        mean = (losses * mask).sum() / self.count_targets(mask & self.token_mask(mask))
        return mean + 0.2 * self.classes(logits)


def trained(
    rank: int, world_size: int, settings: Settings | None, kind: type[Classifier], labels: str
) -> torch.Tensor:
    module = kind()
    rows = samples(6)
    batches = [
        {
            key: torch.stack([row[key] for row in rows[at : at + 2]])
            for key in ("input_ids", "labels")
        }
        for at in (0, 2, 4)
    ]
    for batch in batches:
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
        if labels == "none":
            del batch["labels"]
    before = weights(module)
    settings = None if settings is None else {"labels": labels, "parity_check": "off", **settings}
    trainer = trainer_of(world_size, settings)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert (weights(module) - before).norm() > 1e-4
    return weights(module)


@pytest.mark.quick("3-settings1-none-*", "2-settings0-aligned-Frozen")
@pytest.mark.parametrize("kind", [Frozen, FrozenAndWeighed, Mixed])
@pytest.mark.parametrize("labels", ["none", "aligned"])
@pytest.mark.parametrize(("ranks", "settings"), [(2, RING), (3, RING3), (4, HYBRID)])
def test_weights_are_those_of_one_process(
    ranks: int, settings: Settings, labels: str, kind: type[Classifier]
) -> None:
    (want,) = run_ranks(1, trained, None, kind, labels)
    for got in run_ranks(ranks, trained, settings, kind, labels):
        close(got, want)


def test_tokens_beside_a_value_of_frozen_layers() -> None:
    (want,) = run_ranks(1, trained, None, Conditioned, "aligned")
    for got in run_ranks(2, trained, RING, Conditioned, "aligned"):
        close(got, want)
