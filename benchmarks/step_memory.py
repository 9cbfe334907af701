"""Memory of one training step of a small model on some ranks: bytes saved for backward, and the peak.

Bytes of tensors that live at once are counted exactly, on tensors with or without memory.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_cp.bench.model_step import ModelSizes, model_of
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.utils.console import quiet_lightning


class PeakBytes(TorchDispatchMode):
    """The most bytes of storages that were made in the block and lived at once.

    Tensors on the meta device have none; fake tensors count as the tensors that they stand for.
    Memory that an operator allocates and frees internally is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.looks = True
        """``False``: storages are recorded but not summed; summing takes most of the time."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for x in _tensors(made):
            storage = x.untyped_storage()
            if id(storage) not in given:
                ref = StorageWeakRef(storage)
                self._live[ref.cdata] = ref
        if self.looks:
            self.peak = max(self.peak, self.live)
        return made

    @property
    def live(self) -> int:
        """Bytes that live now; engines free a storage's memory and allocate it again."""
        found = {key: torch.UntypedStorage._new_with_weak_ptr(key) for key in self._live}
        self._live = {key: ref for key, ref in self._live.items() if found[key] is not None}
        return sum(storage.nbytes() for storage in found.values() if storage is not None)

    def forget_peak(self) -> None:
        """Restart the peak at the bytes that live now."""
        self.peak = self.live


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors with memory; of a DTensor the local part, as the DTensor itself has none."""
    found = (
        getattr(x, "_local_tensor", x) for x in tree_leaves(tree) if isinstance(x, torch.Tensor)
    )
    return [x for x in found if x.device.type != "meta"]


@dataclass(frozen=True)
class StepMemory:
    """Memory and time of a step on the rank that needs most; parameters and the batch are not counted."""

    local_tokens: int
    kept: int
    """Bytes made in forward that live when backward begins."""
    peak: int
    """The most bytes of tensors at once, gradients of parameters included."""
    resident: int
    """Rise of the process's resident peak in the step."""
    seconds: float
    loss: float


def step(sizes: ModelSizes, local_tokens: int, settings: dict[str, Any]) -> StepMemory:
    """Run forward and backward of one row, with ``local_tokens`` tokens on each rank."""
    model, runtime = attach_model(sizes, settings)
    batch = batch_of(sizes, local_tokens, runtime)
    runtime.begin_step()
    reset_peak()
    before, started = process_memory("VmRSS"), time.monotonic()
    with PeakBytes() as found:
        loss = model(**batch).loss
        kept = found.live
        runtime.step.scale_loss(loss).backward()
    seconds = time.monotonic() - started
    mine = [kept, found.peak, process_memory("VmHWM") - before]
    mean = float(runtime.step.average(loss).detach())
    runtime.detach()
    kept, peak, resident = maximum_over_ranks(mine)
    return StepMemory(local_tokens, kept, peak, resident, seconds, mean)


def attach_model(sizes: ModelSizes, settings: dict[str, Any]) -> tuple[Any, ContextParallelRuntime]:
    """Return a model and the runtime that swapped its attention; all ranks form a ring."""
    ranks = dist.get_world_size()
    model = model_of(sizes)
    runtime = ContextParallelRuntime(StrategyConfig(ring_size=ranks, ulysses_size=1, **settings))
    with quiet_lightning():
        runtime.meshes.build(ranks, "cpu", None, model)
        runtime.attach(model, {}, needs_labels=True)
    return model, runtime


def batch_of(sizes: ModelSizes, local_tokens: int, runtime: ContextParallelRuntime) -> Any:
    """Return this rank's shard of one row."""
    draw = torch.Generator().manual_seed(1)
    row = (1, dist.get_world_size() * local_tokens)
    ids = torch.randint(sizes.vocabulary, row, generator=draw)
    return runtime.shard({"input_ids": ids, "labels": ids.clone()}, needs_labels=True)


def maximum_over_ranks(mine: list[int]) -> list[int]:
    """Return the maximum over ranks of each number."""
    most = torch.tensor(mine)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def reset_peak() -> None:
    """Reset the kernel's record of the process's peak memory."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def process_memory(name: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes.

    Raises:
        ConfigError: the system has no such field.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"this system does not tell {name}: the benchmark needs Linux.")
