"""The load-balancing loss of transformers' routers: that of all tokens of the batch, on every rank."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
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
    Settings,
    alone,
    whole,
)

LENGTH = 29
EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "OlmoeForCausalLM": {"num_experts": 4},
    "GptOssForCausalLM": {"num_local_experts": 4, "head_dim": 8},
}


def batches(sides: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        ids = torch.randint(3, 43, (3, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        if sides == "right":
            mask[0, -9:], mask[2, -1:] = 0, 0
        if sides == "left":
            mask[1, :12] = 0
        batch = {"input_ids": ids * mask, "labels": ids.masked_fill(mask == 0, -100)}
        found.append({**batch, "attention_mask": mask} if sides else batch)
    return found


def trained(
    rank: int, world_size: int, settings: Settings | None, name: str, sides: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    if settings is None:
        alone()
    strategy: Any = "auto" if settings is None else UlyssesRingStrategy(**settings)
    plugins: Any = [] if settings is None else [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    made = make(name, Case(), **EXPERTS, **MODELS[name]).double()
    model: Any
    model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))
    losses: list[torch.Tensor] = []
    for batch in batches(sides):
        part = batch if settings is None else strategy.shard_batch(batch)
        output = model(**part)
        fabric.backward(output.loss)
        mean = output.loss if settings is None else strategy.average(output.loss)
        losses += [mean.detach(), output.aux_loss.detach()]
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
    return losses, {n: whole(p.detach()).clone() for n, p in made.named_parameters()}


@lru_cache(maxsize=16)
def one(name: str, sides: str) -> Any:
    return run_ranks(1, trained, None, name, sides)[0]


@pytest.mark.quick("ring 3-right-Mixtral*", "hybrid--Qwen3*", "ulysses 2-left-Mixtral*")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sides", ["", "left", "right"])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (3, RING3), (2, ULYSSES), (4, HYBRID), (2, {**RING, "data_parallel": "fsdp"})],
    ids=["ring 2", "ring 3", "ulysses 2", "hybrid", "fsdp"],
)
def test_it_is_one_process_s(ranks: int, settings: Settings, name: str, sides: str) -> None:
    losses, weights = one(name, sides)
    for got, of_rank in run_ranks(ranks, trained, settings, name, sides):
        torch.testing.assert_close(got, losses, rtol=1e-6, atol=1e-7, check_dtype=False)
        torch.testing.assert_close(of_rank, weights, rtol=1e-6, atol=1e-7)
