"""Peak memory of a training step on one GPU beside the planner's, by the settings that save memory.

The step is one rank's with the code of several (``gpu_one_rank``). On CUDA the allocator's own peak counts,
on CPU the bytes of tensors that live at once. The planner's figure has no reserve and no communicators: what
it says of tensors is compared.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from benchmarks.gpu_one_rank import ONE_RANK, kernel_calls
from benchmarks.plan_validation.memory import SETTINGS, Cell, predicted
from benchmarks.step_memory import PeakBytes
from lightning_cp.bench.model_step import ModelSizes, ModelStep

GIB = 1 << 30
BOUND = 0.15
"""Largest relative error of a prediction; the allocator rounds, and kernels have memory for parts."""
WARM_TOKENS = 16


@dataclass(frozen=True)
class MemoryRow:
    """One step, in bytes."""

    engine: str
    settings: str
    tokens: int
    predicted: int
    decides: str
    """The moment of the peak, as the planner says."""
    measured: int
    kernels: int = 0
    """Forward passes of the package's kernels in this step and those before it."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def failed(self) -> bool:
        """True where the prediction is beyond its bound, or the package computed no attention."""
        return abs(self.ratio - 1) > BOUND or not self.kernels


MEMORY_HEAD = (
    "engine",
    "settings",
    "tokens",
    "decides",
    "predicted, GiB",
    "measured, GiB",
    "ratio",
    "our kernels, passes",
)


def memory_cells(row: MemoryRow) -> list[object]:
    """Return a line's cells."""
    sizes = (f"{size / GIB:.3f}" for size in (row.predicted, row.measured))
    return [
        row.engine,
        row.settings,
        row.tokens,
        row.decides,
        *sizes,
        f"{row.ratio:.3f}",
        row.kernels,
    ]


def memory_rows(sizes: ModelSizes, tokens: int, device_type: str) -> list[MemoryRow]:
    """Measure each setting with ``ddp`` and ``fsdp``, in a process group of one rank."""
    cells = [
        Cell(sizes, 1, engine, name, tokens) for engine in ("ddp", "fsdp") for name in SETTINGS
    ]
    rows: list[MemoryRow] = []
    for cell in cells:
        expected, decides = predicted(cell)
        with kernel_calls() as calls:
            measured = _peak(cell, device_type)
        known = (cell.engine, cell.name, tokens, expected, decides)
        rows.append(MemoryRow(*known, measured, calls.total()))
    return rows


def _peak(cell: Cell, device_type: str) -> int:
    """Return the peak of a step after two others, so that the optimizer has its state."""
    if device_type == "cuda":
        gc.collect()  # models of other cells
        before = torch.cuda.memory_allocated()
        made = _after_two_steps(cell, device_type)
        torch.cuda.reset_peak_memory_stats()
        made.of(cell.local_tokens)()
        made.end()
        return torch.cuda.max_memory_allocated() - before
    with PeakBytes() as found:
        found.looks = False
        made = _after_two_steps(cell, device_type)
        found.looks = True
        found.forget_peak()
        made.of(cell.local_tokens)()
        made.end()
        return found.peak


def _after_two_steps(cell: Cell, device_type: str) -> ModelStep:
    settings = {**ONE_RANK, **cell.settings}
    made = ModelStep(cell.sizes, "alone", (1, 1), cell.engine, device_type, settings)
    for _ in range(2):
        made.of(WARM_TOKENS)()
    return made
