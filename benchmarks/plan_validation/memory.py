"""Predicted against measured peak memory of a training step on gloo ranks: :func:`verify`.

A small model runs through the strategy's runtime and engine: two steps first, so that the optimizer has its
state and buckets have their order, then the measured one. *Measured* is all tensors that live at once, with
parameters, gradients and the optimizer's state. *Resident* is the rise of the process's own peak above its
memory with everything imported; it also has temporaries of operators and gloo, and memory that the allocator
does not return. *Beyond* is resident minus measured. Bounds hold for the growth with length over all lengths
of a line, and for the peak itself.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.attention_memory import closed_form
from benchmarks.step_memory import (
    PeakBytes,
    attach_model,
    batch_of,
    maximum_over_ranks,
    process_memory,
    reset_peak,
)
from lightning_cp.bench.methods import AttentionCase, ContextParallelMethod
from lightning_cp.bench.model_step import ModelSizes, config_of
from lightning_cp.bench.processes import on_ranks
from lightning_cp.comm import consensus as checksum
from lightning_cp.engines.base import engine as engine_of
from lightning_cp.engines.ddp_comm_hook import CommHook
from lightning_cp.planner.activations import RankStep
from lightning_cp.planner.memory import optimizer_moment, peak_moment
from lightning_cp.planner.model import model_from_config
from lightning_cp.planner.state import ModelShapes, state_bytes
from lightning_cp.utils import console as table
from lightning_cp.utils.console import quiet_lightning

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
"""Additional settings of engines that shard."""
ENGINES = ("ddp", "fsdp")
RANKS = (1, 2, 4)
WARM_TOKENS = 8
LENGTHS = (128, 256, 512, 1024)
"""Local tokens."""
LAYERS_DECIDE = ModelSizes(features=64, inner=192, layers=3, vocabulary=64)
LOGITS_DECIDE = replace(LAYERS_DECIDE, vocabulary=8192)


@dataclass(frozen=True)
class Measured:
    """Bytes of the rank that needs most."""

    peak: int
    """Peak of forward and backward."""
    optimizer: int
    """Peak of the optimizer's step."""
    resident: int


@dataclass(frozen=True)
class Cell:
    """One step."""

    sizes: ModelSizes
    ranks: int
    engine: str
    name: str
    """Name of the settings."""
    local_tokens: int

    @property
    def settings(self) -> dict[str, Any]:
        """The strategy's arguments."""
        return {**SETTINGS, **MORE}[self.name]

    @property
    def line(self) -> tuple[object, ...]:
        """The key that all lengths of a line share."""
        return self.ranks, self.engine, self.sizes, self.name


def measured_step(cell: Cell, before: int) -> Measured:
    """Measure a step on this rank; ``before`` is the process's memory before any measurement."""
    checksum._cached_factors.cache_clear()  # entries of other cells
    gc.collect()
    _give_back()
    with PeakBytes() as found:
        found.looks = False
        model, runtime = attach_model(cell.sizes, {**cell.settings, "data_parallel": cell.engine})
        engine = engine_of(runtime.settings, CommHook())
        engine.before_exchange = runtime.before_data
        runtime.follow_unreduced(engine.unreduced_gradients)
        wrapped = engine.wrap(model, runtime.mesh, torch.device("cpu"), {})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = (found, wrapped, runtime, engine, optimizer)
        for _ in range(2):
            _step(cell, WARM_TOKENS, run)
        reset_peak()
        found.looks = True
        peaks = _step(cell, cell.local_tokens, run)
        resident = process_memory("VmHWM") - before
    runtime.detach()
    return Measured(*maximum_over_ranks([*peaks, resident]))


def _step(cell: Cell, tokens: int, run: Any) -> tuple[int, int]:
    """Return the peaks of forward and backward, and of the optimizer's step."""
    found, wrapped, runtime, engine, optimizer = run
    batch = batch_of(cell.sizes, tokens, runtime)
    found.forget_peak()
    runtime.begin_step()
    loss = wrapped(**batch).loss
    engine.prepare_backward(loss)
    runtime.step.scale_loss(loss).backward()
    engine.finish_backward()
    runtime.end_step()
    peak = found.peak
    del loss
    found.forget_peak()
    optimizer.step()
    optimizer.zero_grad()
    return peak, found.peak


def _give_back() -> None:
    """Return memory that earlier cells freed to the system, where the allocator can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def measured_steps(cells: Sequence[Cell]) -> list[Measured]:
    """Run :func:`measured_step` for each cell on the ranks of a process group."""
    dist.barrier()
    before = process_memory("VmRSS")
    with quiet_lightning():
        return [measured_step(cell, before) for cell in cells]


def cells_of(
    sizes: Sequence[ModelSizes],
    settings: Sequence[str] = tuple(SETTINGS),
    ranks: Sequence[int] = RANKS,
    engines: Sequence[str] = ENGINES,
    lengths: Sequence[int] = LENGTHS,
) -> list[Cell]:
    """Return every combination, with the lengths of a line together."""
    return [
        Cell(*(one, count, engine, name, length))
        for count in ranks
        for one in sizes
        for engine in engines
        for name in settings
        for length in lengths
    ]


def every_cell() -> list[Cell]:
    """Return the cells of the whole table, ordered by ranks."""
    narrow = [LAYERS_DECIDE, LOGITS_DECIDE]
    wide = [replace(one, dtype="float32") for one in narrow]
    mixed = cells_of(wide, list(MORE), [count for count in RANKS if count > 1], ["fsdp"])
    return sorted([*cells_of([*narrow, *wide]), *mixed], key=lambda cell: cell.ranks)


SLOPE_BOUND, PEAK_BOUND = 0.05, 0.10
"""Largest relative errors of predictions."""
COLUMNS = (
    *("ranks", "engine", "dtype", "vocabulary", "settings", "local tokens", "decides"),
    *("predicted, kB", "measured, kB", "ratio", "slope ratio", "resident, kB", "beyond, kB"),
)


@dataclass(frozen=True)
class CellComparison:
    """A cell's prediction and measurement."""

    cell: Cell
    predicted: int
    decides: str
    """The predicted moment of the peak."""
    measured: Measured
    slope_ratio: float = 1.0
    """Predicted over measured growth with length, over all lengths of the line."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured.peak

    @property
    def beyond(self) -> int:
        """Resident bytes that no tensor accounts for."""
        return self.measured.resident - self.measured.peak

    @property
    def holds(self) -> bool:
        """True if the prediction is within its bounds."""
        near = abs(self.ratio - 1) <= PEAK_BOUND
        return near and abs(self.slope_ratio - 1) <= SLOPE_BOUND


def planner_input(cell: Cell) -> RankStep:
    """Return the planner's input for a cell."""
    sizes, settings = cell.sizes, cell.settings
    size = getattr(torch, sizes.dtype).itemsize
    mixed = "mixed_precision" in settings
    return RankStep(
        model_from_config(config_of(sizes), f"a small {sizes.family}"),
        cell.local_tokens,
        cell.ranks,
        itemsize=2 if mixed else size,
        parameter_itemsize=size,
        reduce_itemsize=4 if mixed else 0,
        recompute=settings.get("activation_checkpointing", "none"),
        chunked_loss=settings.get("chunked_loss", 0),
        pytorch_loss=hasattr(torch.nn, "LinearCrossEntropyOptions"),
        tiled_mlp=settings.get("tiled_mlp", 0),
        attention=_attention(cell),
        engine=cell.engine,
        shard_ranks=1 if cell.engine == "ddp" else cell.ranks,
    )


def _attention(cell: Cell) -> tuple[int, int]:
    """Return attention's bytes in (forward, backward) on the rank that needs most."""
    sizes, ranks = cell.sizes, cell.ranks
    dtype = getattr(torch, sizes.dtype)
    tokens = ranks * cell.local_tokens
    case = AttentionCase(tokens, ranks, sizes.heads, sizes.kv_heads, sizes.head_dim, dtype=dtype)
    forms = [closed_form(ContextParallelMethod(1, ranks), case, rank) for rank in range(ranks)]
    return max(form[0] for form in forms), max(form[1] for form in forms)


def bytes_between_steps(step: RankStep) -> int:
    """Return bytes between steps: parameters, and AdamW's state in their dtype."""
    model, size = step.model, step.parameter_itemsize
    shapes = ModelShapes(
        tuple(one.shape for one in model.before),
        tuple(tuple(one.shape for one in layer.parameters) for layer in model.layers),
        tuple(one.shape for one in model.after),
    )
    ranks = step.shard_ranks
    found = state_bytes(
        shapes, step.engine, rank=0, ranks=ranks, itemsize=size, state_itemsize=size
    )
    return found.parameters + found.optimizer


def predicted(cell: Cell) -> tuple[int, str]:
    """Return the predicted peak of a step's forward and backward, and its moment."""
    step = planner_input(cell)
    most = peak_moment(step)
    return bytes_between_steps(step) + most.total, most.name


def predicted_optimizer(cell: Cell) -> int:
    """Return the predicted peak of the optimizer's step."""
    step = planner_input(cell)
    return bytes_between_steps(step) + optimizer_moment(step).total


def compare(cells: Sequence[Cell], measured: Sequence[Measured]) -> list[CellComparison]:
    """Compare predictions with measurements, with slopes over the lengths of a line."""
    found = [
        CellComparison(cell, *predicted(cell), one)
        for cell, one in zip(cells, measured, strict=True)
    ]
    return [one for _, line in groupby(found, lambda x: x.cell.line) for one in _sloped(list(line))]


def _sloped(line: Sequence[CellComparison]) -> Iterator[CellComparison]:
    if len(line) < 2:
        yield from line
        return
    lengths = [one.cell.local_tokens for one in line]
    said, was = (
        np.polyfit(lengths, peaks, 1)[0]
        for peaks in ([one.predicted for one in line], [one.measured.peak for one in line])
    )
    yield from (replace(one, slope_ratio=float(said / was)) for one in line)


def measure(cells: Sequence[Cell]) -> list[CellComparison]:
    """Measure on new processes, one set for each number of ranks, and compare."""
    found: list[Measured] = []
    for ranks, group in groupby(cells, lambda cell: cell.ranks):
        found += on_ranks(ranks, measured_steps, list(group))[0]
    return compare(cells, found)


def rows(found: Sequence[CellComparison]) -> Iterator[list[str]]:
    """Yield the table's rows, under ``COLUMNS``."""
    for one in found:
        cell = one.cell
        sizes = (one.predicted, one.measured.peak)
        yield [
            *(str(cell.ranks), cell.engine, cell.sizes.dtype, f"{cell.sizes.vocabulary:,}"),
            *(cell.name, f"{cell.local_tokens:,}", one.decides),
            *(f"{size / 1e3:,.0f}" for size in sizes),
            *(f"{one.ratio:.3f}", f"{one.slope_ratio:.3f}"),
            *(f"{size / 1e3:,.0f}" for size in (one.measured.resident, one.beyond)),
        ]


def verify(cells: Sequence[Cell] | None = None) -> tuple[str, bool]:
    """Return the table of cells (default: all), and True if every prediction is within bounds."""
    found = measure(every_cell() if cells is None else cells)
    return table.markdown_table(COLUMNS, rows(found)), all(one.holds for one in found)
