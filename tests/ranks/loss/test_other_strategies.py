"""Values of whole rows by the mixin under Lightning's own strategies: one process's, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ConfigError, ShapeError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import LENGTH, Batch, Small, close, trainer_of, weights

ENDS = torch.tensor([29, 17, 23, 8])


def rows() -> Batch:
    """Four padded rows."""
    ids = torch.randint(0, 48, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.arange(LENGTH) < ENDS[:, None]}


class Contrastive(ContextParallelMixin, Small):
    """Each row's last token against those of all rows."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        last = self.sequence_pick(self.logits(batch), -1, batch["attention_mask"])
        first = self.sequence_pick(self.logits(batch), 0)
        every = self.gather_data(torch.stack([last, first], 1))
        last, first = every.tanh().unbind(1)
        return F.cross_entropy(last @ first.T, torch.arange(len(last)))


def own_rows(rank: int, world_size: int) -> Batch:
    return {name: x.chunk(world_size)[rank] for name, x in rows().items()}


def fitted(rank: int, world_size: int, strategy: Any) -> torch.Tensor:
    module = Contrastive()
    settings = None if world_size == 1 else {}
    trainer = trainer_of(world_size, settings, strategy=strategy, max_epochs=2)
    trainer.fit(module, DataLoader([own_rows(rank, world_size)], batch_size=None))  # type: ignore[arg-type]
    return weights(module)


def looped(rank: int, world_size: int, strategy: Any) -> torch.Tensor:
    """The same with Fabric."""
    plugins: Any = [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    plain = Contrastive()
    module, optimizer = fabric.setup(plain, plain.configure_optimizers())
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(module.training_step(own_rows(rank, world_size), 0))
        optimizer.step()
    return weights(plain)


@pytest.mark.parametrize("way", [fitted, looped])
def test_rows_of_all_ranks_of_ddp(way: Any) -> None:
    (want,) = run_ranks(1, fitted, "auto")
    for got in run_ranks(2, way, "ddp"):
        close(got, want)


def as_many(rows: torch.Tensor, rank: int) -> torch.Tensor:
    return rows


def fewer(rows: torch.Tensor, rank: int) -> torch.Tensor:
    return rows[: 2 - rank]


def other_dtype(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Of the same size, so that they would be read as other numbers."""
    return rows.detach().long() if rank else rows.detach()


def without_a_gradient(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """The other rank would wait in backward."""
    return rows.detach() if rank else rows


def gathered(rank: int, world_size: int, strategy: Any, change: Any) -> None:
    class Gathering(Contrastive):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            return self.gather_data(change(self.logits(batch)[:, 0], rank)).sum()

    trainer = trainer_of(world_size, {}, strategy=strategy)
    trainer.fit(Gathering(), DataLoader([own_rows(rank, world_size)], batch_size=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [fewer, other_dtype, without_a_gradient])
def test_rows_that_differ_between_ranks_are_refused(change: Any) -> None:
    match = r"gather_data was given \(\d, 48\).* on this rank.*Give as many rows on every rank"
    expect_on_every_rank(2, gathered, "ddp", change, error=ShapeError, match=match)


class Sharing(DDPStrategy):
    """Its ranks have the same rows."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}


def shared(rank: int, world_size: int) -> None:
    gathered(rank, world_size, Sharing(), as_many)


def test_ranks_that_share_rows_are_refused() -> None:
    match = "gather_data does not know which ranks of Sharing have other rows"
    expect_on_every_rank(2, shared, error=ConfigError, match=match)


@pytest.mark.parametrize("kind", ["short", "last"])
def test_a_mask_of_a_picked_token(kind: str) -> None:
    module, batch = Contrastive(), rows()
    mask = batch["attention_mask"]
    if kind == "short":
        with pytest.raises(ShapeError, match=r"mask takes values .* got \(4, 28\)"):
            module.sequence_pick(batch["input_ids"], -1, mask[:, 1:])
        return
    got = module.sequence_pick(batch["input_ids"], -1, mask)
    assert torch.equal(got, batch["input_ids"][torch.arange(4), ENDS - 1])
