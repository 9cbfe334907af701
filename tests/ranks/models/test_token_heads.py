"""Labels of tokens by transformers' own heads, and embeddings of rows: one process's loss and gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.models.steps import Case
from tests.helpers.models.zoo import make
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    RING3,
    ULYSSES,
    Batch,
    Settings,
    alone,
    whole,
)
from tests.ranks.models.test_row_heads import ENCODER, LENGTH

Trained = tuple[list[torch.Tensor], dict[str, torch.Tensor]]
"""Losses, and weights by name."""
HEADS: dict[str, dict[str, Any]] = {
    "BertForTokenClassification": ENCODER,
    "LlamaForTokenClassification": {},
    "Qwen2ForTokenClassification": {},
}


def batches(rows: int, *, labelled: bool) -> list[Batch]:
    """Rows with padding on either side; a label for every second token or none."""
    generator = torch.Generator().manual_seed(4)
    found: list[Batch] = []
    for _ in range(2):
        ids = torch.randint(3, 43, (rows, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -9:], mask[1, :12] = 0, 0
        batch = {"input_ids": ids * mask, "attention_mask": mask}
        if labelled:
            labels = torch.randint(0, 5, (rows, LENGTH), generator=generator)
            labels[:, ::2] = -100
            batch["labels"] = labels.masked_fill(mask == 0, -100)
        found.append(batch)
    return found


def fabric_of(world_size: int, settings: Settings | None) -> Any:
    torch.manual_seed(3)
    if settings is None:
        alone()
    strategy: Any = "auto" if settings is None else UlyssesRingStrategy(**settings)
    plugins: Any = [] if settings is None else [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    return fabric


def labelled(rank: int, world_size: int, settings: Settings | None, name: str) -> Trained:
    fabric = fabric_of(world_size, settings)
    strategy = fabric.strategy
    options = {"num_labels": 5, "classifier_dropout": 0.0, **HEADS[name]}
    made = make(name, Case(), **options).double()
    model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))
    losses: list[torch.Tensor] = []
    for batch in batches(3, labelled=True):
        part = batch if settings is None else strategy.shard_batch(batch)
        loss = model(**part).loss
        fabric.backward(loss)
        losses.append((loss if settings is None else strategy.average(loss)).detach())
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
    return losses, {n: whole(p.detach()).clone() for n, p in made.named_parameters()}


@lru_cache(maxsize=8)
def of_one_process(name: str) -> Trained:
    return run_ranks(1, labelled, None, name)[0]


# A layer with a bias returns a view: PyTorch says so of any fully sharded head that has one.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.quick("ring3-Bert*", "ring2-Llama*")
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (3, RING3), (2, ULYSSES), (4, HYBRID), (2, {**RING, "data_parallel": "fsdp"})],
    ids=["ring2", "ring3", "ulysses", "hybrid", "fsdp"],
)
def test_labels_of_tokens(ranks: int, settings: Settings, name: str) -> None:
    """Not shifted, without a word about labels."""
    for got in run_ranks(ranks, labelled, settings, name):
        torch.testing.assert_close(got, of_one_process(name), rtol=1e-6, atol=1e-7)


def embedded(rank: int, world_size: int, settings: Settings | None, pooling: str) -> Trained:
    """Each of four rows against all others, which two data ranks have."""
    fabric = fabric_of(world_size, None if settings is None else {"labels": "none", **settings})
    strategy = fabric.strategy
    made = make("BertModel", Case(), **ENCODER).double()
    made.pooler = None
    model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))
    data, at = (1, 0) if settings is None else (strategy.data_parallel_size, strategy.data_rank)
    losses: list[torch.Tensor] = []
    for batch in batches(4, labelled=False):
        mine = {key: x.chunk(data)[at] for key, x in batch.items()}
        part = mine if settings is None else strategy.shard_batch(mine)
        hidden = model(**part).last_hidden_state
        rows = pooled(hidden, mine, None if settings is None else strategy, pooling)
        every = rows if settings is None else strategy.gather_data(rows)
        every = F.normalize(every, dim=-1)
        loss = F.cross_entropy(every @ every.T / 0.2, torch.arange(4).roll(1))
        fabric.backward(loss)
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
    return losses, {n: whole(p.detach()).clone() for n, p in made.named_parameters()}


def pooled(hidden: torch.Tensor, whole_rows: Batch, strategy: Any, pooling: str) -> torch.Tensor:
    """[rows, C]: the mean over tokens that are not padding, or the first of them."""
    mask = whole_rows["attention_mask"]
    if strategy is not None:
        mean = strategy.sequence_mean(hidden)
        return mean if pooling == "mean" else strategy.sequence_pick(hidden, 0)
    if pooling == "mean":
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return hidden[torch.arange(len(hidden)), mask.argmax(1)]


@lru_cache(maxsize=2)
def embedded_alone(pooling: str) -> Trained:
    return run_ranks(1, embedded, None, pooling)[0]


@pytest.mark.quick("data2 ring2-mean")
@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (3, RING3),
        (4, {**RING, "data_parallel_size": 2}),
        (4, {**ULYSSES, "data_parallel_size": 2, "data_parallel": "fsdp"}),
    ],
    ids=["ring3", "data2 ring2", "data2 ulysses2 fsdp"],
)
def test_contrastive_losses_of_all_rows(ranks: int, settings: Settings, pooling: str) -> None:
    for got in run_ranks(ranks, embedded, settings, pooling):
        torch.testing.assert_close(got, embedded_alone(pooling), rtol=1e-6, atol=1e-7)
