"""Mixtures of experts of transformers, small and in float64; their losses by definition, and their training.

transformers computes three things in float32, whatever the model's dtype: the cross-entropy, the sums of the
routers' loss in one process, and the softmax of most routers (not of GPT-OSS). Here they are float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.models.steps import Case
from tests.helpers.models.zoo import make
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import Batch, Settings, alone, trainer_of, whole

LENGTH = 29
COEFFICIENT = 0.3
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "OlmoeForCausalLM": {"num_experts": 4},
    "GptOssForCausalLM": {"num_local_experts": 4, "head_dim": 8},
}
DOCUMENTS = [(0, 0, 11), (0, 11, LENGTH), (1, 0, LENGTH), (2, 0, 3), (2, 3, LENGTH)]
"""Row, first token and end of each document of a packed batch."""
ROWS: dict[str, list[tuple[int, int, int]]] = {
    "plain": [(row, 0, LENGTH) for row in range(3)],
    "right": [(0, 0, LENGTH - 9), (1, 0, LENGTH), (2, 0, LENGTH - 1)],
    "left": [(0, 0, LENGTH), (1, 12, LENGTH), (2, 0, LENGTH)],
    "packed": DOCUMENTS,
    "few": [(row, 0, LENGTH) for row in range(3)],
    "unlabelled": [(row, 0, LENGTH) for row in range(3)],
}
"""Kinds of batches: where their tokens are. Most ranks have no label of "few"; none has one of the last."""


def mixture(name: str, **options: Any) -> Any:
    """The same weights every time."""
    torch.manual_seed(3)
    routers: dict[str, Any] = {
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": COEFFICIENT,
    }
    model = make(name, Case(use_cache=False), **{**routers, **MODELS[name], **options}).double()
    model.loss_function = cross_entropy
    for part in model.modules():
        if type(part).__name__.endswith("TopKRouter"):
            kind = type(part)
            part.__class__ = type(kind.__name__, (_WideRouter, kind), {})
    return model


class _WithoutFloat32(TorchFunctionMode):
    """Leaves out conversions of float64 to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0]
        if func is F.softmax:
            kwargs["dtype"] = None
        return func(*args, **kwargs)


class _WideRouter(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _WithoutFloat32():
            return super().forward(*args, **kwargs)


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """As transformers', in the dtype of the logits; 0 without labels."""
    if shift_labels is None:
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != -100).sum().clamp(min=1)
    total = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
    return total / num_items_in_batch


cross_entropy.__name__ = "ForCausalLMLoss"


def balance(
    gate_logits: tuple[torch.Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The load-balancing loss of one process, in the dtype of the logits."""
    shares = torch.stack(gate_logits).softmax(-1)  # [layers, tokens, experts]
    if attention_mask is not None:
        shares = shares[:, attention_mask.flatten() != 0]
    shares = shares.flatten(0, 1)
    chosen = F.one_hot(shares.topk(top_k, -1).indices, num_experts).to(shares.dtype).sum(1)
    return num_experts * (chosen.mean(0) * shares.mean(0)).sum()


@contextmanager
def balance_of_one_process(model: Any) -> Iterator[None]:
    """Within, the routers' loss of this model's family is ``balance``."""
    with patch.object(sys.modules[type(model).__module__], "load_balancing_loss_func", new=balance):
        yield


def batches(kind: str) -> list[Batch]:
    """Three batches of three rows."""
    generator = torch.Generator().manual_seed(4)
    mask = torch.zeros(3, LENGTH, dtype=torch.int64)
    positions = torch.zeros_like(mask)
    for row, start, end in ROWS[kind]:
        mask[row, start:end] = 1
        positions[row, start:end] = torch.arange(end - start)
    found: list[Batch] = []
    for _ in range(3):
        ids = torch.randint(3, 43, (3, LENGTH), generator=generator) * mask
        batch: Batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
        if kind in ("left", "right"):
            batch["attention_mask"] = mask
        if kind == "packed":
            batch["position_ids"] = positions
            batch["labels"][positions == 0] = -100
        if kind in ("few", "unlabelled"):
            batch["labels"][:, 4 if kind == "few" else 0 :] = -100
        found.append(batch)
    return found


class OneProcess:
    """Values of whole rows or documents, by their definition."""

    def __init__(self, kind: str) -> None:
        self._documents = ROWS[kind]

    def sequence_sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[row, start:end].sum(0) for row, start, end in self._documents])


def own_loss(model: Any, batch: Batch, values: Any) -> torch.Tensor:
    """The model's own: labels and routers."""
    return model(**batch).loss


def preferred(logits: torch.Tensor, batch: Batch, values: Any) -> torch.Tensor:
    """As DPO, of two rows or documents; each token's own id is its target."""
    logps = logits.log_softmax(-1).gather(-1, batch["input_ids"][..., None]).squeeze(-1)
    sums = values.sequence_sum(logps)
    return -F.logsigmoid(0.1 * (sums[0] - sums[1]) + 0.3)


def mixed(model: Any, batch: Batch, values: Any) -> torch.Tensor:
    """The three kinds of terms."""
    output = model(**batch)
    return output.loss + 0.3 * preferred(output.logits, batch, values)


def with_z_loss(model: Any, batch: Batch, values: Any) -> torch.Tensor:
    """The z-loss of routers (ST-MoE) beside the model's own loss, as the docs have it."""
    output = model(**batch)
    z = torch.stack(output.router_logits).logsumexp(-1).square().sum(0).view_as(batch["input_ids"])
    z_loss = values.sequence_sum(z).sum() / values.sequence_sum(torch.ones_like(z)).sum()
    return output.loss + 0.05 * z_loss


def without_routers(model: Any, batch: Batch, values: Any) -> torch.Tensor:
    """Of labels alone."""
    return model(**batch, output_router_logits=False).loss


LOSSES: dict[str, Callable[[Any, Batch, Any], torch.Tensor]] = {
    "own": own_loss,
    "routers off": without_routers,
    "mixed": mixed,
    "z": with_z_loss,
}
Trained = tuple[list[torch.Tensor], dict[str, torch.Tensor]]
"""The losses of all steps, and the weights after them."""


def train_alone(rank: int, world_size: int, name: str, loss: str, kind: str) -> Trained:
    """Train in one process, without this package."""
    alone()
    model, losses = mixture(name), list[torch.Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with balance_of_one_process(model):
        for batch in batches(kind):
            value = LOSSES[loss](model, batch, OneProcess(kind))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.detach())
    return losses, _weights(model)


def train_by_fabric(
    rank: int, world_size: int, settings: Settings, name: str, loss: str, kind: str
) -> Trained:
    """Train in a loop of Fabric."""
    strategy: Any = UlyssesRingStrategy(**settings)
    plugins: Any = [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    made, losses = mixture(name), list[torch.Tensor]()
    model, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1))
    try:
        for batch in batches(kind):
            value = LOSSES[loss](model, strategy.shard_batch(batch), strategy)
            fabric.backward(value)
            losses.append(strategy.average(value).detach())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        strategy.end_step()
    return losses, _weights(made)


class Module(ContextParallelMixin, pl.LightningModule):
    """A module whose loss is one of ``LOSSES``."""

    def __init__(self, name: str, loss: str) -> None:
        super().__init__()
        self.model, self._loss = mixture(name), LOSSES[loss]
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self._loss(self.model, batch, self)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_by_trainer(
    rank: int, world_size: int, settings: Settings, name: str, loss: str, kind: str
) -> Trained:
    """Train with the Trainer, whose first batch the parity check compares with one process."""
    module = Module(name, loss)
    torch.set_default_dtype(torch.float64)  # that of metrics; weights are drawn in float32
    loader: Any = DataLoader(batches(kind), batch_size=None)  # type: ignore[arg-type]
    trainer_of(world_size, {"labels": "auto", **settings}).fit(module, loader)
    return module.losses, _weights(module.model)


DOORS: dict[str, Callable[..., Trained]] = {"fabric": train_by_fabric, "trainer": train_by_trainer}


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
