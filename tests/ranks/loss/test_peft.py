"""DPO of peft's adapters, whose reference is the model with them switched off: one process's numbers.

``make test-trl`` installs peft beside the environment; without it these tests are skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.models.zoo import use_torchs_norms
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import RING, RING3, Settings, alone, close, whole
from tests.ranks.checkpoint.pretrained.test_adapters import IDS, adapted


def trained(rank: int, world_size: int, settings: Settings | None) -> tuple[list[float], Any]:
    """Three steps: the losses, and the adapters after them."""
    strategy: Any = "auto"
    if settings is None:
        alone()
    else:
        strategy = UlyssesRingStrategy(labels="none", **settings)
    plugins: Any = [] if settings is None else [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    network = adapted()
    use_torchs_norms(network)
    network.double()
    learns = [p for p in network.parameters() if p.requires_grad]
    model: Any
    model, optimizer = fabric.setup(network, torch.optim.SGD(learns, lr=5.0))
    losses: list[float] = []
    for ids in IDS:
        batch = {"input_ids": ids, "targets": ids.roll(-1, 1), "answer": torch.ones_like(ids)}
        batch["answer"][0, 17:] = 0
        part = batch if settings is None else strategy.shard_batch(batch)
        with torch.no_grad(), network.disable_adapter():
            before = sums(strategy, model, part)
        chosen, rejected = sums(strategy, model, part) - before
        loss = -F.logsigmoid(chosen - rejected)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if settings is not None:
        strategy.end_step()
    named = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    return losses, {name: whole(p).clone() for name, p in named.items()}


def sums(strategy: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[2]: the log-probability of each row's answer."""
    logits = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    logps = logits.gather(-1, batch["targets"][..., None]).squeeze(-1)
    if strategy == "auto":
        return (logps * batch["answer"]).sum(1)
    return strategy.sequence_sum(logps, batch["answer"])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, RING), (3, RING3), (2, {**RING, "data_parallel": "fsdp"})],
    ids=["ring 2", "ring 3", "fsdp"],
)
def test_dpo_against_the_model_without_its_adapters(ranks: int, settings: Settings) -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test-trl")
    dims = {"sequence_dims": {"targets": 1, "answer": 1}}
    (want,) = run_ranks(1, trained, None)
    assert abs(want[0][-1] - want[0][0]) > 1e-3  # at first the policy is its reference
    for got in run_ranks(ranks, trained, {**settings, **dims}):
        close(got, want)
