"""LitGPT's models as their users train them: in a Trainer, and with LoRA in a Fabric loop."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from tests.helpers.models.litgpt_zoo import (
    CAP,
    LLAMA,
    LORA,
    litgpt_file,
    litgpt_model,
    needs_litgpt,
)
from tests.helpers.pool import run_ranks
from tests.helpers.strategies.small import (
    HYBRID,
    RING,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    close,
    loader,
    trainer_of,
    weights,
)
from tests.ranks.strategies.test_fabric import fabric_of

pytestmark = needs_litgpt

GEMMA: Settings = {"family": "Gemma-2-2b", "head_size": 8, "n_query_groups": 2}
WINDOWED: Settings = {"sliding_window_size": 11, "sliding_window_indices": [1, 0]}


def gemma() -> Any:
    """Windows in one layer, caps in both."""
    torch.manual_seed(11)
    torch.set_default_dtype(torch.float64)
    caps: Settings = {"attention_logit_softcapping": CAP, "padded_vocab_size": VOCAB}
    return litgpt_model(**GEMMA, **WINDOWED, **caps).double()


class Trained(pl.LightningModule):
    """Labels are aligned, as LitGPT's data modules have them."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gemma()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        logits = self.gpt(batch["input_ids"])
        return litgpt_file("utils").chunked_cross_entropy(logits, batch["labels"], chunk_size=0)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = F.cross_entropy(
            self.gpt(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )
        self.log("val_loss", loss, batch_size=1, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fitted(rank: int, world_size: int, settings: Settings | None) -> Any:
    """Weights after six steps, and the loss of validation."""
    module = Trained()
    before = weights(module)
    trainer = trainer_of(world_size, settings)
    trainer.fit(module, loader(12), loader(4))
    assert (weights(module) - before).abs().max() > 1e-2
    return weights(module), float(trainer.callback_metrics["val_loss"])


@lru_cache(maxsize=1)
def fitted_alone() -> Any:
    return run_ranks(1, fitted, None)[0]


@pytest.mark.parametrize(
    "settings",
    [HYBRID, RING, {**ULYSSES, "data_parallel": "fsdp"}],
    ids=["hybrid", "ring", "ulysses, fsdp"],
)
def test_a_trainer_equals_one_process(settings: Settings) -> None:
    """Caps make LitGPT's own softmax float32 in one process."""
    want, loss = fitted_alone()
    for got, own in run_ranks(4 if settings is HYBRID else 2, fitted, settings):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        assert own == pytest.approx(loss, rel=1e-6)


def tuned(rank: int, world_size: int, settings: Settings | None) -> Any:
    """Only LoRA's weights are trained, logits come in chunks, as in LitGPT's own script."""
    torch.manual_seed(11)
    torch.set_default_dtype(torch.float64)
    fabric = fabric_of(world_size, settings)
    fabric.launch()
    plain = litgpt_model("lora", **LLAMA, **LORA, padded_vocab_size=VOCAB).double()
    litgpt_file("lora").mark_only_lora_as_trainable(plain)
    trained = [p for p in plain.parameters() if p.requires_grad]
    setup: Any = fabric.setup(plain, torch.optim.SGD(trained, lr=0.1))
    model, optimizer = setup
    strategy: Any = fabric.strategy
    losses: list[float] = []
    for batch in loader(12):
        local = batch if settings is None else strategy.shard_batch(batch)
        chunks = model(local["input_ids"], lm_head_chunk_size=5)
        logits = torch.cat(chunks, dim=1).flatten(0, 1)
        loss = F.cross_entropy(logits, local["labels"].flatten())
        fabric.backward(loss)
        shown = loss if settings is None else strategy.average(loss)
        losses.append(float(shown.detach()))
        optimizer.step()
        optimizer.zero_grad()
    if settings is not None:
        strategy.end_step()
    return losses, torch.cat([p.detach().flatten() for p in trained])


@lru_cache(maxsize=1)
def tuned_alone() -> Any:
    return run_ranks(1, tuned, None)[0]


@pytest.mark.parametrize("settings", [HYBRID, ULYSSES], ids=["hybrid", "ulysses"])
def test_lora_in_fabric_equals_one_process(settings: Settings) -> None:
    for got in run_ranks(4 if settings is HYBRID else 2, tuned, settings):
        close(got, tuned_alone())
