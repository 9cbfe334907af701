"""The language model of the main job, an ordinary LightningModule without any notion of ranks; its metrics.

The metrics do not depend on how the batch was sharded. Shapes: ``logits_BLV`` float [batch, local length,
vocabulary]; labels int64 ``[B, L]`` with -100 where there is nothing to predict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from lightning_cp.errors import ConfigError
from lightning_cp.planner.model import read_config
from lightning_cp.utils.labels import IGNORED_LABEL, shift

Number = TypeVar("Number", float, torch.Tensor)
Batch = dict[str, torch.Tensor]


def bits_per_byte(loss: Number) -> Number:
    """Convert a mean cross-entropy from nats per byte, the unit of losses, to bits per byte."""
    return loss / math.log(2)


def aligned_labels(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the token that the logits of each position predict, ``[B, L]``.

    A sharded batch has them as ``shift_labels``: they were shifted before the sequence was split, because a
    shift of a shard would lose its last target. A whole batch is shifted here.

    Raises:
        ConfigError: the batch has neither ``shift_labels`` nor ``labels``.
    """
    if "shift_labels" in batch:
        return batch["shift_labels"]
    if "labels" not in batch:
        raise ConfigError(
            f"a metric needs batch['labels'] or batch['shift_labels'], got keys {sorted(batch)}. "
            "Have the dataset give labels."
        )
    return shift(batch["labels"])


class TokenLoss(Metric):
    """Mean cross-entropy over the valid tokens of all ranks, in nats.

    Its state is their sum and number, added over the whole world: the ranks of a context-parallel group hold
    different tokens of one sample, so nothing is counted twice. A rank without a valid token adds nothing.
    """

    total: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            zero = torch.zeros((), dtype=torch.float64)
            self.add_state(name, zero, dist_reduce_fx="sum")

    def update(self, loss: torch.Tensor, logits_BLV: Any, labels_BL: torch.Tensor) -> None:
        """Add a batch.

        Args:
            loss: the model's mean, which counts where there are no logits (``chunked_loss=``).
            logits_BLV: of this rank's tokens.
            labels_BL: from ``aligned_labels``.
        """
        count = (labels_BL != IGNORED_LABEL).sum()
        if isinstance(logits_BLV, torch.Tensor):
            wide = torch.promote_types(logits_BLV.dtype, torch.float32)
            rows = logits_BLV.flatten(0, 1).to(wide)
            total = F.cross_entropy(rows, labels_BL.flatten(), reduction="sum")
        else:
            total = torch.where(count > 0, loss * count, 0.0)
        self.total += total
        self.count += count

    def compute(self) -> torch.Tensor:
        """Return the mean."""
        return self.total / self.count


class LanguageModel(L.LightningModule):
    """Next-token training of a Hugging Face causal language model.

    Args:
        network: given ``input_ids``, ``position_ids``, ``labels``, returns ``loss`` and ``logits``.
        optimizer: makes the optimizer from parameters with their names.
        warmup_steps: steps of linear warm-up; a cosine down to ``final_rate`` follows.
        final_rate: the learning rate at the end, as a share of the highest.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        warmup_steps: int = 20,
        final_rate: float = 0.1,
    ) -> None:
        super().__init__()
        self.network = network
        self.make_optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.final_rate = final_rate
        self.val_loss = TokenLoss()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the mean cross-entropy of the batch, in nats per token."""
        loss = self.network(**batch).loss
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Reset the metric, in the inference mode of the loop that starts."""
        self.val_loss.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Update the metric; the logits are not gathered."""
        output = self.network(**batch)
        self.val_loss.update(output.loss, output.logits, aligned_labels(batch))

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the whole validation text, over the tokens of all ranks."""
        loss = self.val_loss.compute()
        self.log_dict({"val/loss": loss, "val/perplexity": loss.exp()}, sync_dist=True)
        self.log("val/bits_per_byte", bits_per_byte(loss), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the configured optimizer, with a learning rate per step."""
        optimizer = self.make_optimizer(self.network.named_parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = LambdaLR(optimizer, lambda step: self.rate(step, steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step out of ``steps``, as a share of the highest."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.final_rate + (1 - self.final_rate) * cosine


def model_on_meta(
    config: Mapping[str, Any] | str | Path, dtype: torch.dtype | str = "float32"
) -> nn.Module:
    """Return the causal language model of a ``config.json`` on the meta device, without values or memory.

    Engines give it both, part by part.

    Args:
        config: its content, in which ``model_type`` names the family; or the file, or its folder.
        dtype: dtype of the parameters, whatever ``config`` says.

    Raises:
        ConfigError: transformers is not installed, or has no causal language model of that kind.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            "building a model from its config.json needs transformers. Install transformers."
        ) from error
    settings = read_config(config) if isinstance(config, str | Path) else dict(config)
    dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    kind = settings.pop("model_type", None)
    try:
        read = AutoConfig.for_model(kind, **settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read, dtype=dtype)
        model.tie_weights()  # transformers 5.0 does not on the meta device
    except ValueError as error:
        told = re.split(r" (?:Should contain|Model type should be) one of", str(error))[0]
        raise ConfigError(  # without the list of hundreds of others
            f"transformers makes no causal language model of model_type={kind!r}: {told}"
        ) from error
    return model.train()
