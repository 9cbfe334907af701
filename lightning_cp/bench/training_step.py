"""One training job two ways: by a Trainer with the strategy, and by a loop that does the same by hand.

The loop gets the sharded batches, the layouts and the plans of attention that the Trainer's run has made;
it scales the loss, calls the same attention, averages gradients with the same DistributedDataParallel, clips
and steps. What it leaves out is what the strategy and Lightning do around that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_cp.attention.api import attend
from lightning_cp.attention.plan import AttentionPlan, make_plan
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.batch import ShardedBatch
from lightning_cp.bench.own_time import OwnTime
from lightning_cp.bench.strategy_time import watch_strategy
from lightning_cp.bench.training_job import Batch, Job
from lightning_cp.callback import ContextParallelCallback
from lightning_cp.loss import loss_scale
from lightning_cp.mesh import ContextParallelMesh, Flat
from lightning_cp.strategies.trainer import UlyssesRingStrategy

CLIP = 1.0


@dataclass
class Steps:
    """What a run of steps took on one rank."""

    cpu: list[float] = field(default_factory=list)
    """CPU-seconds of the process, all threads, by step."""
    own: list[dict[str, float]] = field(default_factory=list)
    """CPU-seconds within the strategy's functions by name, by step."""


class Module(pl.LightningModule):
    """The main job's step: the model's own loss, logged."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The mean cross-entropy."""
        loss = self.network(**batch).loss
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The main job's."""
        return _optimizer(self.network)


def by_trainer(job: Job, settings: dict[str, Any], steps: int) -> Recorder:
    """Train on this rank's part of the world; the first step is left out, it sets up."""
    _tell_lightning_of_the_ranks()
    time_of = OwnTime()
    recorder = Recorder(time_of)
    recorder.watch()
    try:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=UlyssesRingStrategy(**settings),
            max_steps=steps + 1,
            gradient_clip_val=CLIP,
            callbacks=[Hooks()] if job.hooks else [],
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader: Any = DataLoader(job.rows(steps + 1), batch_size=1)  # type: ignore[arg-type]
        recorder.network = job.network()
        trainer.fit(Module(recorder.network), loader)
        recorder.kept = trainer  # its strategy ends the mesh when nobody knows it any more
    finally:
        time_of.unwatch()
    return recorder


class Hooks(pl.Callback):
    """Might log something at a batch's end."""

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Logs nothing."""


class Recorder:
    """Takes the time at the end of each batch, and keeps how it was sharded; no callback of the user's."""

    network: Any
    kept: Any

    def __init__(self, time_of: OwnTime) -> None:
        self.steps = Steps()
        self.parts: list[ShardedBatch] = []
        self.mesh: ContextParallelMesh | None = None
        self._time_of = time_of
        self._before: tuple[float, Mapping[str, float]] | None = None

    def watch(self) -> None:
        """From here on, until the time is unwatched."""
        watch_strategy(self._time_of)
        own = ContextParallelCallback.on_train_batch_end

        def ended(callback: Any, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            own(callback, trainer, *args, **kwargs)
            self.take(trainer.strategy)

        self._time_of.replace(ContextParallelCallback, "on_train_batch_end", ended)

    def take(self, strategy: Any) -> None:
        """A step is over: the next one begins with fetching its batch."""
        now, own = time.process_time(), dict(self._time_of.seconds)
        if self._before is not None:
            known = self._before[1]
            self.steps.cpu.append(now - self._before[0])
            self.steps.own.append({name: own[name] - known.get(name, 0.0) for name in own})
        self._before = time.process_time(), own
        self.mesh = strategy.mesh
        self.parts.append(strategy._core._part)


def by_hand(job: Job, recorder: Recorder) -> tuple[Steps, Any]:
    """The same steps by a loop of a few lines; and the network that it has trained."""
    mesh = recorder.mesh
    assert mesh is not None
    plans = [_plan(job, mesh, part) for part in recorder.parts]
    network = job.network()
    current: list[AttentionPlan] = []
    with _attention(network, current):
        model = DistributedDataParallel(network, process_group=mesh.group(Flat.LOSS))
        optimizer = _optimizer(network)
        steps = Steps()
        before = time.process_time()
        for part, plan in zip(recorder.parts, plans, strict=True):
            current[:] = [plan]
            optimizer.zero_grad()
            items = max(part.valid[mesh.cp_rank], 1)
            loss = model(**part.batch, num_items_in_batch=items).loss
            (loss * loss_scale(part.valid, mesh.cp_rank)).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            now = time.process_time()
            steps.cpu.append(now - before)
            before = now
    return Steps(steps.cpu[1:]), network


def _plan(job: Job, mesh: ContextParallelMesh, part: ShardedBatch) -> AttentionPlan:
    local, dim = part.layout.local_len, job.hidden // job.heads
    q, k, v = (torch.empty(1, local, heads, dim) for heads in (job.heads, *(job.kv_heads,) * 2))
    plan = make_plan(q, k, v, mesh, part.layout, AttentionSpec(), "auto")
    _ = plan.hops  # made when asked for, and kept
    return plan


@contextmanager
def _attention(network: Any, current: list[AttentionPlan]) -> Iterator[None]:
    """Have the model attend by the plan that ``current`` holds."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    def function(_: Any, *inputs: Any, **__: Any) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in inputs[:3])
        out = attend(q, k, v, current[0])
        assert isinstance(out, torch.Tensor)
        return out.contiguous(), None

    name = "lightning_cp_by_hand"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    try:
        network.set_attn_implementation(name)
        yield
    finally:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _optimizer(network: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def _tell_lightning_of_the_ranks() -> None:
    """The processes run already, as torchrun's would: Lightning reads who they are from its variables."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        {
            **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world},
            **{"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
            **{"TORCHELASTIC_RUN_ID": "bench"},
        }
    )
