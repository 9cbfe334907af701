"""The peak of a training step as the planner says it, beside a real one's: :func:`verify`.

Bounds are those of growth with length, over all lengths of a line, and of the peak itself, with parameters,
gradients and the optimizer's state in both. *Beyond* is what a process needs in addition to its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from lightning_cp.bench import table
from lightning_cp.bench.case import Case
from lightning_cp.bench.length_step import config_of
from lightning_cp.bench.memory import closed_form
from lightning_cp.bench.processes import on_ranks
from lightning_cp.bench.ways import Ours
from lightning_cp.plan.measured_step import Cell, Measured, every_cell, measured_steps
from lightning_cp.planner.activations import RankStep
from lightning_cp.planner.families import model_of
from lightning_cp.planner.moments import optimizer_moment, peak
from lightning_cp.planner.state import ModelShapes, state_bytes

SLOPE_BOUND, PEAK_BOUND = 0.05, 0.10
"""How far a prediction may be off, as a share."""
COLUMNS = (
    *("ranks", "engine", "dtype", "vocabulary", "settings", "local tokens", "decides"),
    *("predicted, kB", "measured, kB", "ratio", "slope ratio", "resident, kB", "beyond, kB"),
)


@dataclass(frozen=True)
class Compared:
    """What was said of a cell, and what it took."""

    cell: Cell
    predicted: int
    decides: str
    """The moment that needs most, as predicted."""
    measured: Measured
    slope_ratio: float = 1.0
    """Of growth with length, of all lengths of the line, predicted over measured."""

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


def asked(cell: Cell) -> RankStep:
    """What the planner is asked of a cell."""
    sizes, settings = cell.sizes, cell.settings
    size = getattr(torch, sizes.dtype).itemsize
    mixed = "mixed_precision" in settings
    return RankStep(
        model_of(config_of(sizes), f"a small {sizes.family}"),
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
    """Of the rank that needs most; alone, what PyTorch's operator returns."""
    sizes, ranks = cell.sizes, cell.ranks
    dtype = getattr(torch, sizes.dtype)
    tokens = ranks * cell.local_tokens
    case = Case(tokens, ranks, sizes.heads, sizes.kv_heads, sizes.head_dim, dtype=dtype)
    forms = [closed_form(Ours(1, ranks), case, rank) for rank in range(ranks)]
    return max(form[0] for form in forms), max(form[1] for form in forms)


def held(step: RankStep) -> int:
    """Bytes between steps: parameters, and AdamW's state in their dtype."""
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
    """Peak bytes of a step's forward and backward, and the moment that they are of."""
    step = asked(cell)
    most = peak(step)
    return held(step) + most.total, most.name


def predicted_optimizer(cell: Cell) -> int:
    """Peak bytes of the optimizer's step."""
    step = asked(cell)
    return held(step) + optimizer_moment(step).total


def compare(cells: Sequence[Cell], measured: Sequence[Measured]) -> list[Compared]:
    """What was predicted beside what was measured, with slopes over the lengths of a line."""
    found = [
        Compared(cell, *predicted(cell), one) for cell, one in zip(cells, measured, strict=True)
    ]
    return [one for _, line in groupby(found, lambda x: x.cell.line) for one in _sloped(list(line))]


def _sloped(line: Sequence[Compared]) -> Iterator[Compared]:
    if len(line) < 2:
        yield from line
        return
    lengths = [one.cell.local_tokens for one in line]
    said, was = (
        np.polyfit(lengths, peaks, 1)[0]
        for peaks in ([one.predicted for one in line], [one.measured.peak for one in line])
    )
    yield from (replace(one, slope_ratio=float(said / was)) for one in line)


def measure(cells: Sequence[Cell]) -> list[Compared]:
    """Measure on fresh processes, those of one number of ranks together, and compare."""
    found: list[Measured] = []
    for ranks, group in groupby(cells, lambda cell: cell.ranks):
        found += on_ranks(ranks, measured_steps, list(group))[0]
    return compare(cells, found)


def rows(found: Sequence[Compared]) -> Iterator[list[str]]:
    """Of the table, under ``COLUMNS``."""
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
    """The table of cells, all of them unless some are given, and whether every one holds."""
    found = measure(every_cell() if cells is None else cells)
    return table.aligned(COLUMNS, rows(found)), all(one.holds for one in found)
