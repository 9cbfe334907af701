"""Policy and reference in one step, without logits: a frozen copy, or the policy without its adapter."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin, linear_cross_entropy
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.plain_llama import PlainLlama
from tests.helpers.strategies.small import (
    HYBRID,
    LENGTH,
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


class Policy(PlainLlama):
    """Its forward is the log-probability of each token's target; an adapter may be left out, as LoRA's."""

    def __init__(self) -> None:
        super().__init__(VOCAB, num_heads=4, num_kv_heads=2, layers=1)
        self.adapter = nn.Linear(32, 32, bias=False)

    def forward(self, tokens: torch.Tensor, batch: Batch, *, adapted: bool = True) -> torch.Tensor:  # type: ignore[override]
        """[B, L]; the head's weight is whole here, whatever the engine."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, batch.get("position_ids", torch.arange(tokens.shape[1])[None]))
        x = x + self.adapter(x) if adapted else x
        given = (self.norm(x), self.head.weight, None, batch["targets"])
        return -linear_cross_entropy(*given, chunk_tokens=8)


class Preferring(ContextParallelMixin, Small):
    """``kind`` is ``copy`` or ``adapter``."""

    context_parallel_sequence_dims = {"targets": 1, "answer": 1}  # noqa: RUF012

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Policy()
        if kind == "copy":
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
        else:
            self.model.requires_grad_(False)
            self.model.adapter.requires_grad_(True)

    def sums(self, model: nn.Module, batch: Batch, **options: bool) -> torch.Tensor:
        return self.sequence_sum(model(batch["input_ids"], batch, **options), batch["answer"])

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            frozen = getattr(self, "reference", None)
            before = (
                self.sums(self.model, batch, adapted=False)
                if frozen is None
                else self.sums(frozen, batch)
            )
        chosen, rejected = self.sums(self.model, batch) - before
        return -F.logsigmoid(0.1 * (chosen - rejected) + 0.3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def pairs() -> list[Batch]:
    ids = torch.stack([row["input_ids"] for row in samples(6)])
    answer = torch.arange(LENGTH) >= torch.tensor([[7], [20]])
    return [
        {"input_ids": x, "targets": x.roll(-1, 1), "answer": answer} for x in ids.view(3, 2, -1)
    ]


def trained(rank: int, world_size: int, settings: Settings | None, kind: str) -> torch.Tensor:
    module = Preferring(kind)
    loader: Any = DataLoader(pairs(), batch_size=None)  # type: ignore[arg-type]
    settings = None if settings is None else {"labels": "none", **settings}
    trainer_of(world_size, settings).fit(module, loader)
    return weights(module)


@lru_cache(maxsize=2)
def alone(kind: str) -> torch.Tensor:
    return run_ranks(1, trained, None, kind)[0]


@pytest.mark.quick("adapter-ring3", "copy-fsdp")
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, RING),
        (3, RING3),
        (4, HYBRID),
        (2, {**RING, "data_parallel": "fsdp"}),
        (2, {**RING, "activation_checkpointing": "blocks"}),
    ],
    ids=["ring2", "ring3", "hybrid", "fsdp", "recomputed"],
)
@pytest.mark.parametrize("kind", ["copy", "adapter"])
def test_policy_and_reference(ranks: int, settings: Settings, kind: str) -> None:
    for got in run_ranks(ranks, trained, settings, kind, timeout=120):
        close(got, alone(kind))
