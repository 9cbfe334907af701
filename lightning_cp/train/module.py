"""The language model of the main job: an ordinary LightningModule; it knows nothing of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_cp.metrics import aligned_labels, bits_per_byte, token_perplexity

Batch = dict[str, torch.Tensor]


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
        self.perplexity = token_perplexity()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The mean cross-entropy of the batch, in nats per token."""
        loss = self.network(**batch).loss
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Start counting anew, in the inference mode or not of the loop that is about to run."""
        self.perplexity.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Collect perplexity; the logits stay where they are."""
        logits_BLV = self.network(**batch).logits
        self.perplexity.update(logits_BLV, aligned_labels(batch))

    def on_validation_epoch_end(self) -> None:
        """Log what the whole validation text costs, token by token over all ranks."""
        perplexity = self.perplexity.compute()
        loss = perplexity.log()
        self.log_dict({"val/loss": loss, "val/perplexity": perplexity}, sync_dist=True)
        self.log("val/bits_per_byte", bits_per_byte(loss), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The configured optimizer, its rate set anew at every step."""
        optimizer = self.make_optimizer(self.network.named_parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = LambdaLR(optimizer, lambda step: self.rate(step, steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step out of ``steps``, as a share of the highest."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.final_rate + (1 - self.final_rate) * cosine
