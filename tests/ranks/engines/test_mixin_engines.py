"""The mixin's methods under every engine and in every stage: FSDP2's class comes before the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_cp import ContextParallelMixin
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import (
    RING,
    Batch,
    Settings,
    Small,
    close,
    loader,
    trainer_of,
    weights,
)


class Asks(ContextParallelMixin, Small):
    """Calls all methods of the mixin in all stages; keeps what they say."""

    context_parallel_labels = "aligned"

    def __init__(self) -> None:
        super().__init__()
        self.said: list[torch.Tensor] = []

    def ask(self, batch: Batch) -> torch.Tensor:
        """The loss; all values are those of one process."""
        logits, labels = self.logits(batch), batch["labels"]
        with self.draw_per("token"):
            losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        mask = (labels != -100) & self.token_mask(labels)
        loss = (losses * mask).sum() / self.count_targets(mask)
        places = self.token_positions(labels).expand_as(labels)
        whole = [self.unshard(logits), self.unshard(x=places, dim=1), self.average(loss)]
        self.said += [x.detach().clone() for x in whole]
        self.cp_log("mean", losses.detach().sum(), mask.sum())
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.ask(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.ask(batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self.unshard(self.logits(batch)).mean(1)


def asked(_rank: int, world_size: int, settings: Settings | None) -> list[torch.Tensor]:
    """What the methods said in training, validation and prediction, and the weights."""
    module = Asks()
    trainer = trainer_of(world_size, settings)
    trainer.fit(module, loader(8), loader(4))
    said = [*module.said, trainer.callback_metrics["mean"]]
    predicted: Any = trainer.predict(module, loader(4))
    return [*said, *predicted, weights(module)]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        close(one, other)


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero1"])
def test_methods_of_the_mixin_equal_those_of_one_process(engine: str) -> None:
    (want,) = run_ranks(1, asked, None)
    for got in run_ranks(2, asked, {**RING, "data_parallel": engine}):
        same(got, want)


@pytest.mark.nightly
def test_methods_of_the_mixin_are_the_same_with_hsdp_and_ddp() -> None:
    data = {"ring_size": 2, "ulysses_size": 1, "data_parallel_size": 2}
    replicas = {"data_parallel": "hsdp", "data_parallel_replicate_size": 2}
    wanted = run_ranks(4, asked, {**data, "data_parallel": "ddp"})
    for got, want in zip(run_ranks(4, asked, {**data, **replicas}), wanted, strict=True):
        same(got, want)
