"""The peak of a real training step on gloo ranks: what ``plan/compared_step.py`` has predictions beside.

A small model, through the strategy's own core and engine: two steps before, so that the optimizer has its
state and buckets have their order, then one that is measured. *Measured* is every tensor that there is at
once, parameters, gradients and the optimizer's state included. *Resident* is what the process's own peak rose
above what it had with everything imported; it has, in addition, what operators and gloo take within
themselves, and what the allocator does not give back.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.bench.length_step import Sizes, attached, batch_of, most_of_all
from lightning_cp.bench.loading import reset_peak, status
from lightning_cp.bench.peak_bytes import PeakBytes
from lightning_cp.bench.quiet import quiet_lightning
from lightning_cp.comm import checksum
from lightning_cp.strategies.engines import engine as engine_of
from lightning_cp.strategies.engines.comm_hooks import CommHook

CHUNK = 64
"""Tokens of a chunk of the loss; few, so that short sequences show slopes."""
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": "blocks", "chunked_loss": CHUNK}
KEEPING: dict[str, Any] = {"activation_checkpointing": "keep_attention", "chunked_loss": CHUNK}
MIXED: dict[str, Any] = {"mixed_precision": "bfloat16", **RECOMPUTED}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks, chunked_loss": RECOMPUTED,
    "keep_attention, chunked_loss": KEEPING,
}
MORE: dict[str, dict[str, Any]] = {"blocks, chunked_loss, mixed_precision": MIXED}
"""Of engines that shard."""
ENGINES = ("ddp", "fsdp")
RANKS = (1, 2, 4)
WARM_TOKENS = 8
LENGTHS = (128, 256, 512, 1024)
"""Local tokens."""
LAYERS_DECIDE = Sizes(features=64, inner=192, layers=3, vocabulary=64)
LOGITS_DECIDE = replace(LAYERS_DECIDE, vocabulary=8192)


@dataclass(frozen=True)
class Measured:
    """Of the rank that needs most."""

    peak: int
    """Of forward and backward."""
    optimizer: int
    """Of the optimizer's step."""
    resident: int


@dataclass(frozen=True)
class Cell:
    """One step."""

    sizes: Sizes
    ranks: int
    engine: str
    name: str
    """Of the settings."""
    local_tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """Of the strategy."""
        return {**SETTINGS, **MORE}[self.name]

    @property
    def line(self) -> tuple[object, ...]:
        """What it has in common with the other lengths of its line."""
        return self.ranks, self.engine, self.sizes, self.name


def measured_step(cell: Cell, before: int) -> Measured:
    """On each of ``cell.ranks`` ranks; ``before`` is what the process had when nothing was measured yet."""
    checksum._kept_factors.cache_clear()  # those of other cells
    gc.collect()
    _give_back()
    with PeakBytes() as found:
        found.looks = False
        model, core = attached(cell.sizes, {**cell.settings, "data_parallel": cell.engine})
        engine = engine_of(core.settings, CommHook())
        engine.before_data = core.before_data
        core.follow_unreduced(engine.unreduced)
        wrapped = engine.wrap(model, core.mesh, torch.device("cpu"), {})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = (found, wrapped, core, engine, optimizer)
        for _ in range(2):
            _step(cell, WARM_TOKENS, run)
        reset_peak()
        found.looks = True
        peaks = _step(cell, cell.local_tokens, run)
        resident = status("VmHWM") - before
    core.detach()
    return Measured(*most_of_all([*peaks, resident]))


def _step(cell: Cell, tokens: int, run: Any) -> tuple[int, int]:
    """Peaks of forward and backward, and of the optimizer's step."""
    found, wrapped, core, engine, optimizer = run
    batch = batch_of(cell.sizes, tokens, core)
    found.forget_peak()
    core.begin_step()
    loss = wrapped(**batch).loss
    engine.expect(loss)
    core.scale_loss(loss).backward()
    engine.require_averaged()
    core.end_step()
    peak = found.peak
    del loss
    found.forget_peak()
    optimizer.step()
    optimizer.zero_grad()
    return peak, found.peak


def _give_back() -> None:
    """Have what earlier cells have freed go back to the system, where the allocator can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def measured_steps(cells: Sequence[Cell]) -> list[Measured]:
    """One after the other, on the ranks of a process group; :func:`measured_step`."""
    dist.barrier()
    before = status("VmRSS")
    with quiet_lightning():
        return [measured_step(cell, before) for cell in cells]


def cells_of(
    sizes: Sequence[Sizes],
    settings: Sequence[str] = tuple(SETTINGS),
    ranks: Sequence[int] = RANKS,
    engines: Sequence[str] = ENGINES,
    lengths: Sequence[int] = LENGTHS,
) -> list[Cell]:
    """Every combination, lines of lengths together."""
    return [
        Cell(*(one, count, engine, name, length))
        for count in ranks
        for one in sizes
        for engine in engines
        for name in settings
        for length in lengths
    ]


def every_cell() -> list[Cell]:
    """Those of the whole table, by numbers of ranks."""
    narrow = [LAYERS_DECIDE, LOGITS_DECIDE]
    wide = [replace(one, dtype="float32") for one in narrow]
    mixed = cells_of(wide, list(MORE), [count for count in RANKS if count > 1], ["fsdp"])
    return sorted([*cells_of([*narrow, *wide]), *mixed], key=lambda cell: cell.ranks)
