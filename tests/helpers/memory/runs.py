"""Training of a Hugging Face model by a Trainer or Fabric, to be compared with one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric

from lightning_cp.memory.chunked_logits import ChunkedLogits
from tests.helpers.strategies.small import RING, VOCAB, alone, loader, trainer_of, whole
from tests.ranks.strategies.test_fabric import fabric_of

SETTINGS = {**RING, "labels": "auto", "parity_check": "off"}  # which makes logits in one process
STEPS = 4
BACKEND = "aot_eager"
"""Graphs as any other backend gets them, run without code generation."""


@dataclass(frozen=True)
class Run:
    """One run; ``settings`` are the strategy's, ``None`` is one process."""

    settings: tuple[tuple[str, Any], ...] | None = None
    fabric: bool = False
    tied: bool = True
    precision: str | None = None
    accumulate: int = 1
    rows: int = 2
    """Of a batch."""
    steps: int = STEPS
    compiled: str = ""
    """What is given to ``torch.compile``: ``all`` (what is trained), ``model`` (inside it), ``blocks``."""


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    val_loss: float = 0.0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def execute(rank: int, world_size: int, run: Run) -> Result:
    """Train on every rank; float64 unless a precision is asked for."""
    torch.set_default_dtype(torch.float32 if run.precision else torch.float64)
    module = Module(run)
    batches = loader(run.steps * run.rows * run.accumulate, run.rows)
    result = (
        _by_fabric(world_size, run, module, batches)
        if run.fabric
        else _by_trainer(world_size, run, module, batches)
    )
    result.weights = {name: whole(x.detach()).clone() for name, x in module.named_parameters()}
    return result


class Module(pl.LightningModule):
    """A Llama that computes its loss by itself; labels are the next tokens of what it reads."""

    def __init__(self, run: Run) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(3)
        sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 40}
        heads: dict[str, Any] = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
        }
        tied: dict[str, Any] = {"tie_word_embeddings": run.tied, "use_cache": False}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tied))
        self.losses: list[float] = []
        self.chunked = bool(dict(run.settings or ()).get("chunked_loss"))

    def loss(self, batch: Any) -> torch.Tensor:
        return loss_of(self.model, batch, self.chunked)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=1, sync_dist=True)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: Any, batch: Any, chunked: bool) -> torch.Tensor:
    """The model's own; its logits are made, or not, as was asked for."""
    output = model(input_ids=batch["input_ids"], labels=batch["labels"])
    assert isinstance(output.logits, ChunkedLogits) == chunked
    return output.loss


def _by_trainer(world_size: int, run: Run, module: Module, batches: Any) -> Result:
    settings = None if run.settings is None else {**SETTINGS, **dict(run.settings)}
    trainer = trainer_of(
        world_size, settings, precision=run.precision, accumulate_grad_batches=run.accumulate
    )
    trainer.fit(_compiled(run, module, module.model), batches, loader(4))
    return Result(module.losses, float(trainer.callback_metrics["val_loss"]))


def _by_fabric(world_size: int, run: Run, module: Module, batches: Any) -> Result:
    if run.settings is None:
        alone()
        fabric = Fabric(accelerator="cpu", devices=1)
    else:
        fabric = fabric_of(world_size, {**SETTINGS, **dict(run.settings)})
    fabric.launch()
    strategy: Any = fabric.strategy
    model = _compiled(run, module.model, module.model)
    setup: Any = fabric.setup(model, module.configure_optimizers())
    model, optimizer = setup
    result = Result()
    for batch in batches:
        part = batch if run.settings is None else strategy.shard_batch(batch)
        loss = loss_of(model, part, module.chunked)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss if run.settings is None else strategy.average(loss)
        result.losses.append(float(shown.detach()))
    return result


def _compiled(run: Run, whole: Any, model: Any) -> Any:
    """``whole``, all of it compiled or parts of it."""
    if run.compiled == "all":
        return torch.compile(whole, backend=BACKEND)
    parts = {"": [], "model": [model], "blocks": model.model.layers}[run.compiled]
    for part in parts:
        part.compile(backend=BACKEND)
    return whole
