"""Targets that a step draws, without labels: masked language models, masked diffusion; also weighted alike.

The oracle is a loop by hand in one process: sums over all targets of a window, divided once by their number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    LENGTH,
    RING,
    RING3,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    Small,
    alone,
    close,
    trainer_of,
    weights,
)

BATCHES, WINDOW, ROWS = 4, 2, 2
Drawn = tuple[torch.Tensor, torch.Tensor]
"""Losses of tokens [B, L], 0 where they do not count, and what counts [B, L]."""


def batches(data_rank: int) -> list[Batch]:
    """Rows with a seed, from which the step draws for whole rows."""
    generator = torch.Generator().manual_seed(data_rank)
    return [
        {
            "input_ids": torch.randint(1, VOCAB, (ROWS, LENGTH), generator=generator),
            "seed": torch.tensor(10 * at + data_rank),
        }
        for at in range(BATCHES)
    ]


class Drawing(ContextParallelMixin, Small):
    """``kind`` is ``masked`` or ``diffusion``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def drawn(self, batch: Batch) -> Drawn:
        ids = batch["input_ids"]
        generator = torch.Generator().manual_seed(int(batch["seed"]))
        levels = 0.2 + 0.6 * torch.rand(ROWS, 1, generator=generator)

        def draw(x: torch.Tensor) -> torch.Tensor:
            return torch.rand(x.shape, generator=generator)

        real = self.token_mask(ids).expand_as(ids)
        mask = (self.draw_whole(draw, ids.double()) < levels) & real
        logits = self.logits({**batch, "input_ids": ids.masked_fill(mask, 0)})
        losses = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        if self.kind == "masked":
            return losses * mask, mask
        return losses * mask / levels, real  # an estimate of the likelihood of all tokens

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        losses, counted = self.drawn(batch)
        return losses.sum() / self.count_targets(counted)


class OfLosses(Drawing):
    """The same mean by PyTorch's function, which ignores what was not masked."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        losses, counted = self.drawn(batch)
        self.count_targets(counted)
        return losses[counted].mean()


def by_hand(rank: int, world_size: int, kind: str, data: int, weighting: str) -> torch.Tensor:
    alone()
    module = Drawing(kind)
    optimizer = module.configure_optimizers()
    every = [batches(data_rank) for data_rank in range(data)]
    for first in range(0, BATCHES, WINDOW):
        window = [of_rank[at] for at in range(first, first + WINDOW) for of_rank in every]
        drawn = [module.drawn(batch) for batch in window]
        counts = [counted.sum() for _, counted in drawn]
        alike = weighting == "global"
        for (losses, _), count in zip(drawn, counts, strict=True):
            (losses.sum() / (sum(counts) if alike else count * len(window))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


@lru_cache(maxsize=8)
def want(kind: str, data: int, weighting: str) -> torch.Tensor:
    return run_ranks(1, by_hand, kind, data, weighting)[0]


def trained(
    rank: int, world_size: int, model: type[Drawing], kind: str, settings: Settings
) -> torch.Tensor:
    module = model(kind)
    data_rank = rank * settings.get("data_parallel_size", 1) // world_size
    loader: Any = DataLoader(batches(data_rank), batch_size=None)  # type: ignore[arg-type]
    settings = {"labels": "none", **settings}
    trainer_of(world_size, settings, accumulate_grad_batches=WINDOW).fit(module, loader)
    return weights(module)


GRIDS: dict[str, tuple[int, Settings]] = {
    "ring2": (2, RING),
    "ring3": (3, RING3),
    "hybrid": (4, HYBRID),
    "data and ulysses": (4, {**ULYSSES, "data_parallel_size": 2}),
    "data and ring, fsdp": (4, {**RING, "data_parallel_size": 2, "data_parallel": "fsdp"}),
}


@pytest.mark.quick("masked-global-data and ulysses", "diffusion-micro_batch-ring3")
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("weighting", ["micro_batch", "global"])
@pytest.mark.parametrize("kind", ["masked", "diffusion"])
def test_targets_that_are_counted(kind: str, weighting: str, grid: str) -> None:
    ranks, mode = GRIDS[grid]
    settings = {**mode, "token_weighting": weighting}
    for got in run_ranks(ranks, trained, Drawing, kind, settings, timeout=120):
        close(got, want(kind, settings.get("data_parallel_size", 1), weighting))


@pytest.mark.nightly
@pytest.mark.parametrize("weighting", ["micro_batch", "global"])
def test_a_mean_of_pytorch(weighting: str) -> None:
    settings = {**RING, "token_weighting": weighting}
    for got in run_ranks(2, trained, OfLosses, "masked", settings, timeout=120):
        close(got, want("masked", 1, weighting))
