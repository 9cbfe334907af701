"""Callbacks of the main job: metrics of every step, peak memory, Muon's report, and the picture of losses."""

from __future__ import annotations

import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import Optimizer

from lightning_cp.apps.data import data_parallel
from lightning_cp.apps.train.model import bits_per_byte
from lightning_cp.apps.train.report import draw_losses
from lightning_cp.apps.train.resume import print_once
from lightning_cp.engines.gradients import gradient_norm
from lightning_cp.optim import Muon

STATUS = Path("/proc/self/status")


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak MiB so far: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if STATUS.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())):
        return int(found[1]) / 2**10
    # Not on Linux, where it starts from the peak of the process that started this one.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class StepMetrics(Callback):
    """Logs bits per byte, perplexity, gradient norm, tokens and tokens per second of every step.

    Tokens are those of the text: a sequence that several ranks share counts once.

    Args:
        tokens_per_batch: tokens in one batch of one data rank, before any sharding.
    """

    def __init__(self, tokens_per_batch: int) -> None:
        self.tokens_per_batch = tokens_per_batch
        self.tokens = 0
        self.seconds = 0.0
        self._started = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the step's clock."""
        self._started = time.perf_counter()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Log the norm over all gradients of all ranks, before clipping."""
        pl_module.log("train/grad_norm", gradient_norm(pl_module.parameters()).float())

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the metrics of the step's loss and time."""
        loss = float(trainer.callback_metrics["train/loss"])  # waits for the device
        seconds = time.perf_counter() - self._started
        tokens = self.tokens_per_batch * data_parallel(trainer)[0]
        self.tokens += tokens
        self.seconds += seconds
        pl_module.log("train/tokens_per_second", tokens / seconds, prog_bar=True)
        pl_module.log_dict(
            {
                "train/bits_per_byte": bits_per_byte(loss),
                "train/perplexity": torch.tensor(
                    loss
                ).exp(),  # inf instead of an error if it diverged
                "train/learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
                "tokens": float(self.tokens),
            }
        )

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the tokens before this validation, and the peak memory of the largest rank."""
        pl_module.log("tokens", float(self.tokens), sync_dist=True)
        peak = peak_memory_mib(pl_module.device)
        pl_module.log("peak_memory_mib", peak, sync_dist=True, reduce_fx="max")

    def state_dict(self) -> dict[str, Any]:
        """Return the counts that a resumed run continues."""
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts of a checkpoint."""
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]


class MuonReport(Callback):
    """Prints the parameters of Muon and of AdamW; logs the largest attention logit and the clipped heads."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table once."""
        for optimizer in _muons(trainer):
            print_once(optimizer.table())

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the step's clipping; it is the same on every rank."""
        for optimizer in _muons(trainer):
            clip = getattr(optimizer, "qk_clip", None)
            if clip is not None and clip.largest:
                clipped = sum(map(len, clip.clipped.values()))
                pl_module.log("train/max_logit", max(clip.largest.values()))
                pl_module.log("train/clipped_heads", float(clipped))


def _muons(trainer: L.Trainer) -> list[Muon]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Muon)]


class LossPicture(Callback):
    """Draws the losses logged so far, after every validation.

    Args:
        metrics: the CSV logger's file.
        picture: the image to write.
        entropy: byte-unigram entropy of the validation text, drawn as a line, bits per byte.
    """

    def __init__(self, metrics: Path, picture: Path, entropy: float) -> None:
        self.metrics = metrics
        self.picture = picture
        self.entropy = entropy

    @rank_zero_only
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the losses; the loggers already have this validation."""
        for logger in trainer.loggers:
            logger.save()
        if self.metrics.is_file():
            draw_losses(self.metrics, self.picture, self.entropy)
