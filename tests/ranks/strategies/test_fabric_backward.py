"""Loops of one's own that call backward other than once per forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    close,
    loader,
)
from tests.ranks.strategies.test_fabric import fabric_of, model_of

Losses = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""One forward: the loss of the model, and that of a probe on its detached outputs."""


class Probed(nn.Module):
    """A model, and a linear probe that it does not learn from."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = model_of()
        self.probe = nn.Linear(VOCAB, VOCAB)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.trunk(ids, positions)
        return logits, self.probe(logits.detach())


def once(losses: Losses, backward: Any) -> None:
    backward(sum(losses()))


def twice_after_one_forward(losses: Losses, backward: Any) -> None:
    loss = sum(losses())
    backward(loss / 3, retain_graph=True)
    backward(loss * 2 / 3)


def two_forwards_first(losses: Losses, backward: Any) -> None:
    first, second = sum(losses()), sum(losses())
    backward(first / 3)
    backward(second * 2 / 3)


def part_by_part(losses: Losses, backward: Any) -> None:
    of_model, of_probe = losses()
    backward(of_probe)
    backward(of_model)


def model_only(losses: Losses, backward: Any) -> None:
    backward(losses()[0])


WAYS = (once, twice_after_one_forward, two_forwards_first, part_by_part)


def trained(rank: int, world_size: int, settings: Settings | None, way: Any) -> torch.Tensor:
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    plain = Probed()
    setup: Any = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9))
    model, optimizer = setup
    strategy: Any = fabric.strategy
    for whole in fabric.setup_dataloaders(loader(6), use_distributed_sampler=False):
        batch: Batch = whole if settings is None else strategy.shard_batch(whole)

        def losses(batch: Batch = batch) -> tuple[torch.Tensor, torch.Tensor]:
            ids, labels = batch["input_ids"], batch["labels"].flatten()
            positions = batch.get("position_ids", torch.arange(ids.shape[1])[None])
            of_model, of_probe = (
                F.cross_entropy(x.flatten(0, 1), labels) for x in model(ids, positions)
            )
            return of_model, of_probe

        way(losses, fabric.backward)
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
    return torch.cat([p.detach().flatten() for p in plain.parameters()])


@lru_cache(maxsize=8)
def alone_trained() -> torch.Tensor:
    return run_ranks(1, trained, None, once)[0]


@pytest.mark.quick("once-ulysses", "part_by_part-ulysses")
@pytest.mark.parametrize("settings", [RING, ULYSSES, HYBRID], ids=["ring", "ulysses", "hybrid"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_pass_is_averaged(way: Any, settings: Settings) -> None:
    ranks = settings["ring_size"] * settings["ulysses_size"]
    for got in run_ranks(ranks, trained, settings, way):
        close(got, alone_trained())


def test_a_part_that_gets_no_gradient_is_refused_at_the_step() -> None:
    match = r"no gradient to some parameters that are trained \(.*probe.weight, .*probe.bias\)"
    expect_on_every_rank(2, trained, RING, model_only, error=ConfigError, match=match)
