"""The functions of the strategy that run in a training step, by what they are for.

Where Lightning, PyTorch, the model or the user's step calls us, our time begins to count; where we call
them back (their parents' methods, the user's step, backward, attention itself) it stops. Sums of small
tensors and agreements count as messages, whoever asks for them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy

from lightning_cp.bench.own_time import OwnTime
from lightning_cp.callback import ContextParallelCallback
from lightning_cp.comm import agreement
from lightning_cp.logs import ranks
from lightning_cp.logs.module import ModuleLog
from lightning_cp.logs.settle import StepLog
from lightning_cp.models import handle, hf
from lightning_cp.models.hf_call import CallCheck
from lightning_cp.models.hf_loss import LossWatch
from lightning_cp.strategies.engines.ddp import DDPEngine
from lightning_cp.strategies.loaders.passes import Pass
from lightning_cp.strategies.trainer import UlyssesRingStrategy

LOADER, SHARDING, MESSAGES = "loader", "sharding", "messages"
CALLS, LOGGING, STEP = "model calls", "logging", "step"
NAMES = (LOADER, SHARDING, MESSAGES, CALLS, LOGGING, STEP)
_WATCHED: tuple[tuple[Any, str, str | None], ...] = (
    (Pass, "__next__", LOADER),
    (Pass, "_fetch", None),  # the user's loader
    (ContextParallelCallback, "shard_batch", SHARDING),
    (agreement, "exchange", MESSAGES),
    (ranks, "exchange", MESSAGES),
    (dist, "all_reduce", MESSAGES),
    (CallCheck, "_complete", CALLS),
    (LossWatch, "_leave", CALLS),
    (handle.SwapHandle, "attention", CALLS),
    (handle, "attend", None),  # attention itself
    (handle.StepState, "note_gradient", CALLS),
    (ModuleLog, "log", LOGGING),
    (StepLog, "settle", LOGGING),
    (LightningModule, "log", None),
    (ModuleLog, "end_hook", LOGGING),
    (ModuleLog, "begin_hook", LOGGING),
    (ContextParallelCallback, "on_train_batch_end", LOGGING),
    (DDPEngine, "_note_forward", STEP),
    *(
        pair
        for method in ("batch_to_device", "training_step", "backward", "optimizer_step", "reduce")
        for pair in ((UlyssesRingStrategy, method, STEP), (DDPStrategy, method, None))
    ),
    (UlyssesRingStrategy, "_complete", STEP),
)


def watch_strategy(time_of: OwnTime) -> None:
    """Count the strategy's own time from here on; before a Trainer is made."""
    for owner, attribute, name in _WATCHED:
        time_of.watch(owner, attribute, name)
    for factory in ("attention_function", "mask_function"):  # they return what the model calls
        _watch_made(time_of, hf, factory, CALLS)


def _watch_made(time_of: OwnTime, owner: Any, factory: str, name: str) -> None:
    make = getattr(owner, factory)

    def counted(*args: Any, **options: Any) -> Any:
        return time_of.counted(make(*args, **options), name)

    time_of.replace(owner, factory, counted)
