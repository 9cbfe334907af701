"""What ``predict_step`` returns comes back in original order and length, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
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
)


class Predicting(ContextParallelMixin, Small):
    """Returns all kinds of things."""

    context_parallel_output_dims = {"flipped": 2, "pooled": None}  # noqa: RUF012

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        logits = self.logits(batch)
        if self.what == "dictionary":
            best = [logits.argmax(-1), {"first": logits[..., 0]}]
            return {"logits": logits, "best": best, "rows": len(logits)}
        if self.what == "tuple":
            return logits, logits.argmax(-1), None, batch_idx
        if self.what == "declared":
            return {"flipped": logits.transpose(1, 2), "pooled": torch.ones(2, 3)}
        if self.what == "own":
            return self.unshard(logits).mean(1)
        if self.what == "replicated":
            # As long as a rank's part of the sequence, which ranks have the same of.
            wide = torch.arange(32.0 // 4).expand(len(logits), -1)
            return {
                "logits": logits,
                "temperature": torch.tensor(0.5),
                "row": batch["row"],
                "w": wide,
            }
        return {"integer": 7, "nothing": None, "logits": logits}[self.what]


def predicted(rank: int, world_size: int, settings: Settings | None, what: str) -> Any:
    module = Predicting(what)
    if settings is None:
        module.unshard = lambda x, dim=1: x  # type: ignore[method-assign]
    rows = [{**sample, "row": torch.tensor(index)} for index, sample in enumerate(samples(5))]
    data: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    return trainer_of(world_size, settings).predict(module, data)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:predict returned None:UserWarning")
@pytest.mark.parametrize(
    "what", ["logits", "dictionary", "tuple", "declared", "own", "replicated", "integer", "nothing"]
)
def test_predictions_are_those_of_one_process(what: str) -> None:
    (want,) = run_ranks(1, predicted, None, what)
    assert len(want) == 3
    for got in run_ranks(4, predicted, HYBRID, what):
        close(got, want)


class Pooled(Small):
    """Returns what is no value per token, and not the same on all ranks."""

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        return {"logits": self.logits(batch), "pooled": self.logits(batch).mean(1)}


class Unalike(Small):
    """Returns different things on different ranks."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        logits = self.logits(batch)
        best = logits.argmax(-1)
        if self.what == "one rank only":
            return logits if self.global_rank == 0 else None
        if self.what == "list":
            return [row.tolist() for row in best]
        if self.what == "array":
            return best.numpy()
        if self.what == "text":
            return {"logits": logits, "text": ["".join(map(chr, row)) for row in best.tolist()]}
        return float(logits.mean())


def predict_unalike(rank: int, world_size: int, what: str) -> None:
    trainer_of(world_size, RING).predict(Unalike(what), loader(2))


@pytest.mark.quick("one rank only", "number")
@pytest.mark.parametrize("what", ["one rank only", "list", "array", "text", "number"])
def test_other_things_on_other_ranks_are_refused_and_nobody_hangs(what: str) -> None:
    match = "predict_step returned different things on the ranks of a group"
    expect_on_every_rank(2, predict_unalike, what, error=ConfigError, match=match, timeout=20)


def predict_pooled(rank: int, world_size: int) -> None:
    trainer_of(world_size, RING).predict(Pooled(), loader(2))


def test_a_prediction_from_a_ranks_own_tokens_is_refused() -> None:
    match = r"returned 'pooled' without a sequence dimension.*context_parallel_output_dims"
    expect_on_every_rank(2, predict_pooled, error=ConfigError, match=match)
